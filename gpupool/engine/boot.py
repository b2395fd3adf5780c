"""Become an engine. Runs on engines, before anything else, in a process that was just forked.

The starter has imported torch and has not touched CUDA, which reads the environment when it is
first used: the device that this names is the only one that anything here will ever see.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from gpupool.core import current
from gpupool.core.errors import DataError
from gpupool.core.progress import draw_with
from gpupool.core.wire import calls
from gpupool.data.stores.cache import private_folder
from gpupool.engine import entry
from gpupool.engine.output.emit import emit_progress
from gpupool.engine.process import pool_folder, this_rank


def main() -> None:
    # A segfault leaves its stack in the log, which the starter reads. The duplicate stays the log:
    # the kernel turns descriptor 2 into a pipe to itself, and nobody reads that after a crash.
    faulthandler.enable(os.dup(2), all_threads=False)
    num_threads = this_rank().num_threads
    pool_folder()  # now: a cell may clear the environment
    # The starter's environment said 1, and libraries read that when they were loaded.
    torch.set_num_threads(num_threads)
    threadpool_limits(num_threads)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _compiler_cache()
    np.random.seed()  # else every rank would draw the same numbers; `random` sees to it itself
    torch.seed()
    _leave_out_debugger()
    from ipyparallel.engine.app import IPEngine

    from gpupool.engine.output.streams import OrderedStream, draw_as_in_a_terminal

    draw_as_in_a_terminal()
    draw_with(lambda: emit_progress)
    current.is_on_rank = lambda: True
    calls.serve = entry.serve
    _wait_for_whole_file(Path(sys.argv[1].removeprefix("--file=")))
    try:
        IPEngine.launch_instance(out_stream_factory=OrderedStream)
    except RuntimeError as error:
        # what tornado makes of the starter's signal
        if str(error) != "Event loop stopped before Future completed.":
            raise


def _leave_out_debugger() -> None:
    """Have ipykernel not import debugpy (0.1 s): an engine has no channel for it. Cells can."""
    sys.modules["debugpy"] = None  # type: ignore[assignment]
    importlib.import_module("ipykernel.debugger")
    del sys.modules["debugpy"]


def _compiler_cache() -> str:
    """Where `torch.compile` keeps machine code for later pools, on a local disk.

    torch's own choice has a name that another user can make a folder of, whose code would be run.
    The notebook's torch may have noted it in the environment; only another choice is the user's.
    """
    asked = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    if asked and not Path(asked).name.startswith("torchinductor_"):
        return asked
    try:
        own = private_folder(Path(tempfile.gettempdir()) / f"gpupool-{os.geteuid()}")
        return str(private_folder(own / "inductor"))
    except DataError:  # another user has taken the name: with the pool it goes
        return str(Path(os.environ["GPUPOOL_FOLDER"]) / "inductor")


def _wait_for_whole_file(connection_file: Path) -> None:
    """The controller writes in place, and an engine that reads half a file ends at once."""
    for _ in range(3000):  # for a minute; then IPEngine says what is missing
        with contextlib.suppress(FileNotFoundError, ValueError):
            json.loads(connection_file.read_text())
            return
        time.sleep(0.02)
