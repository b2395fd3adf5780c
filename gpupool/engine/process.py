"""What this process is: an engine or the notebook itself, which rank, how it ends. Runs on engines.

An inline pool runs engine code in the notebook's own process (`inline.py`, which sets these). The
few places where that makes a difference ask here.
"""

from __future__ import annotations

import functools
import json
import os
import signal

from gpupool.core.machine.topology import Rank
from gpupool.core.wire import environ
from gpupool.core.wire.output import OnMessage

rank: Rank | None = None
"""The notebook's place as rank 0 of 1; None on an engine, which has it from its environment."""

publish: OnMessage | None = None
"""While an inline call runs: takes (kind, content), of what this process shows."""


def is_inline() -> bool:
    """Whether this process is the notebook."""
    return rank is not None


def this_rank() -> Rank:
    """This engine's place; its `gpu` is None."""
    return rank or _rank_of_environment()


@functools.cache  # a cell may clear the environment
def _rank_of_environment() -> Rank:
    return Rank(**json.loads(os.environ[environ.RANK]))


def end_at_once() -> None:
    """Have SIGTERM end this process as it ends any other one; the agent's stop is SIGHUP.

    ipyparallel hears SIGTERM when its loop does, so a rank that computes would continue computing.
    """
    signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))  # runs what is to run at exit
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
