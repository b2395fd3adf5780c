"""What a cell may have broken that the next one needs, put back after it. Runs on engines.

Output, the folder, and the way interrupts come belong to the process: what code does to them lasts.
What works is left as the code wants it: a tee of the user's stays `sys.stdout`.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_folder = ""


def note_folder(folder: str) -> None:
    """The notebook's folder: where a rank goes whose own is gone."""
    global _folder
    _folder = folder


def restore() -> None:
    """Put back what does not work, and say so on stderr."""
    # here: a loop under torchrun imports this file, and may have no ipykernel
    from gpupool.engine.output.streams import restore_streams, say

    if threading.current_thread() is threading.main_thread():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    notes = restore_streams()
    try:
        os.getcwd()
    except OSError:
        there = next(path for path in (_folder, "/") if path and Path(path).is_dir())
        os.chdir(there)
        notes.append(f"The folder that this rank was in is gone. It is in {there} now.")
    for note in notes:
        say(note)
