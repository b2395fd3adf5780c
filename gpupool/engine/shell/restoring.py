"""What a cell may have broken that the next one needs, put back after it. Runs on engines.

Output, the folder, and the way interrupts come belong to the process: what code does to them lasts.
What works is left as the code wants it: a tee of the user's stays `sys.stdout`. Before each call
the same is looked at again, since threads continue after the call that has started them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

_NUM_FRAMES = 1000  # Python's own limit of the stack
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}

_exit = sys.exit
_folder = ""


def note_folder(folder: str) -> None:
    """The notebook's folder: where a rank goes whose own is gone."""
    global _folder
    _folder = folder


def install(kernel: Any) -> None:
    """Let `kernel` answer whatever `sys.stdout` is, and restore before each call of it.

    ipykernel and ipyparallel flush `sys.stdout` before a reply and after each control message: an
    error would cost the reply, for which the client waits, and a wait the thread that interrupts.
    """
    from gpupool.engine.output.streams import OwnSys, follow_call

    for kind in type(kernel).__mro__:
        module = sys.modules[kind.__module__]
        if vars(module).get("sys") is sys:
            vars(module)["sys"] = OwnSys()
    apply, execute = kernel.do_apply, kernel.do_execute

    def do_apply(*args: Any) -> Any:
        follow_call(kernel.get_parent("shell"))
        restore()
        return apply(*args)

    async def do_execute(*args: Any, **options: Any) -> Any:
        follow_call(kernel.get_parent("shell"))
        restore()
        return await execute(*args, **options)

    kernel.do_apply, kernel.do_execute = do_apply, do_execute


def restore() -> None:
    """Put back what does not work, and say so on stderr."""
    # here: a loop under torchrun imports this file, and may have no ipykernel
    from gpupool.engine.output.streams import restore_streams, say

    if threading.current_thread() is threading.main_thread():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    if sys.getrecursionlimit() < _NUM_FRAMES:
        sys.setrecursionlimit(_NUM_FRAMES)
    sys.exit = _exit
    if getattr(getattr(sys, "stdin", None), "closed", True):
        sys.stdin = Path(os.devnull).open()  # noqa: SIM115 # `!command` looks for one
    for note in [*restore_streams(), *_restore_folder()]:
        say(note)


def _restore_folder() -> list[str]:
    try:
        os.getcwd()
    except OSError:
        there = next(path for path in (_folder, "/") if path and Path(path).is_dir())
        os.chdir(there)
        return [f"The folder that this rank was in is gone. It is in {there} now."]
    return []
