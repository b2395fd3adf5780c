"""What a pool asks of who starts its processes. Runs on the client."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from gpupool.core.machine.topology import Rank
from gpupool.pool.status import HostInfo

DIE_S = 20.0
"""From SIGKILL to the end of a process, at most: the driver takes back 80 GB that it had mapped."""

OnExit = Callable[[str, str, str], None]
"""Hears of each end, in a background thread: name of the process, how it ended, end of its log."""


class Launcher(Protocol):
    """The running processes of one pool. Made with an `OnExit`, and one is called for each end."""

    folder: str  # private, and gone with the pool; every rank of this host can read it
    client_file: Path  # what a client needs to connect to the controller
    pids: dict[str, int]  # by the names of `core/wire/starter.py`
    preloaded: threading.Event  # engines can be started without waiting for torch
    down: str = ""  # the command line that ends machines which outlast the pool, if they do

    def is_controller_up(self) -> bool:
        """Whether `client_file` is there, to the last byte."""

    def require_folder(self) -> None:
        """Raise PoolError if the folder was removed."""

    def folder_of(self, rank: int) -> str:
        """The pool's private folder on the host of a rank."""
        return self.folder

    def log(self, name: str) -> str | None:
        """The end of a process's log; None: it is gone."""

    def hosts(self) -> Sequence[HostInfo]:
        """The hosts as they are now; none where all processes are on this one."""
        return ()

    def start_controller(self) -> None:
        """Start ipyparallel's controller; returns at once."""

    def start_engines(self, ranks: Iterable[Rank]) -> None:
        """Start an engine for each of these ranks, new ones too; returns at once."""

    def kill_engines(self, ranks: Iterable[int], *, waits: bool = True) -> None:
        """Kill the engines of these ranks; returns when none is there, nor will be, or at once."""

    def stop(self, *, for_good: bool = False) -> None:
        """End every process and remove the folder; `for_good`: nothing is kept warm. May be called
        again."""


def exit_reason(status: int, cause: str = "") -> str:
    """How a process ended, in words.

    >>> exit_reason(-9, "out of host memory"), exit_reason(1)
    ('was killed by SIGKILL (out of host memory)', 'ended with exit status 1')
    """
    words = f" ({cause})" if cause else ""
    if status < 0:
        known = {number.value: number.name for number in signal.Signals}
        return f"was killed by {known.get(-status, f'signal {-status}')}{words}"
    return f"ended with exit status {status}{words}"
