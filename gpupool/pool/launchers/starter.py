"""The starter of this host as the client sees it: warm, or in use by a pool. Runs on the client.

`%load_ext gpupool` starts it (`gpupool/host/starter.py`) in the background, so that torch is
imported by the time it is needed. A pool takes it and gives it back when it is stopped: the next
pool of this notebook finds it warm.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from gpupool.core.machine.processes import command_for
from gpupool.core.wire import environ
from gpupool.pool.launchers.line import Line

# What is imported before an engine can be forked: see host/starter.py. Reading these opens no zmq
# context. The controller, which needs no torch, is forked before, and is up when the engines are.
NEEDED = (
    "ipyparallel.controller.app",
    "gpupool.host.controller",
    "ipyparallel.engine.app",
    "tornado.platform.asyncio",
    "IPython.core.completerlib",
    "IPython.extensions.storemagic",
    "numpy.random",
    "torch",
    "gpupool.engine.output.streams",
    "gpupool.engine.boot",
)
# The first error and training are not to wait for these.
LATE = (
    "stack_data",
    "gpupool.engine.training.loop",
    "gpupool.engine.inference",
)
# Variables that an interpreter and torch read while they start: a change needs a new starter.
_READ_AT_START = ("PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH")

_WARM_S = 600.0  # how long a starter without a pool stays
ARGUMENTS = (str(_WARM_S), ",".join(NEEDED), ",".join(LATE))
"""What a starter is called with, behind its place."""

_warm: Starter | None = None


class Starter(Line):
    """A running starter of this host; `folder` is private, and goes with it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gpupool-pool-"))  # for this user alone
        self._read_at_start = _read_at_start()
        command = command_for("gpupool.host.starter")
        place = [str(self.folder), str(os.getpid())]
        super().__init__([*command, *place, *ARGUMENTS], environ.inheritable(os.environ))
        self.listen(lambda event: None)

    @property
    def is_usable(self) -> bool:
        """Whether it and its folder are there, and it has what the environment says now."""
        is_there = self._process.poll() is None and self.folder.is_dir()
        return is_there and self._read_at_start == _read_at_start()

    def _ended(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def warm() -> None:
    """Start one in the background, if none is waiting; returns at once.

    Nobody has to use it: it ends after `_WARM_S` seconds without a pool.
    """
    global _warm
    if _warm is None:
        atexit.register(close)
    elif not _warm.is_usable:
        close()
    with uninterrupted():
        _warm = _warm or Starter()


def take() -> Starter:
    """The starter for a pool, which is its only one until it is given back; see `warm`."""
    global _warm
    warm()
    starter, _warm = _warm, None
    assert starter is not None
    return starter


def give_back(starter: Starter) -> None:
    """Keep a starter that has no pool any more for the next one."""
    global _warm
    if _warm is None and starter.is_usable:
        _warm = starter
    else:
        starter.close()


def close() -> None:
    """End the starter that is waiting, if there is one."""
    global _warm
    starter, _warm = _warm, None
    if starter is not None:
        starter.close()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let an interrupt wait for the end of a block: it would lose a process that runs already."""
    heeds = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or heeds is None:
        yield
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, heeds)
        if pressed:
            signal.raise_signal(signal.SIGINT)


def _read_at_start() -> dict[str, str]:
    variables = environ.inheritable(os.environ)
    return {k: v for k, v in variables.items() if k.startswith(_READ_AT_START)}
