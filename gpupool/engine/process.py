"""What this process is: which rank, how it ends. Runs on engines."""

from __future__ import annotations

import functools
import json
import os
import signal

from gpupool.core.machine.topology import Rank
from gpupool.core.wire import environ


@functools.cache  # a cell may clear the environment
def this_rank() -> Rank:
    """This engine's place; its `gpu` is None."""
    return Rank(**json.loads(os.environ[environ.RANK]))


def end_at_once() -> None:
    """Have SIGTERM end this process as it ends any other one; the starter's stop is SIGHUP.

    ipyparallel hears SIGTERM when its loop does, so a rank that computes would continue computing.
    """
    signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))  # runs what is to run at exit
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
