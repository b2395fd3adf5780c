"""What this process is: which rank, how torch is set, how it ends. Runs on engines."""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Mapping
from typing import Any

import torch

from gpupool.core.machine.topology import Rank
from gpupool.core.wire import environ
from gpupool.core.wire.torch_settings import torch_settings

_heard = torch_settings()  # what the notebook's torch was set to when a call came last


@functools.cache  # a cell may clear the environment
def this_rank() -> Rank:
    """This engine's place; its `gpu` is None."""
    return Rank(**json.loads(os.environ[environ.RANK]))


def follow_torch(settings: Mapping[str, Any]) -> None:
    """Set what the notebook has set since the last call; what cells here have set stays else."""
    for setter, value in settings.items():
        if _heard.get(setter) != value:
            _heard[setter] = value
            getattr(torch, setter)(value)


def end_at_once() -> None:
    """Have SIGTERM end this process as it ends any other one; the agent's stop is SIGHUP.

    ipyparallel hears SIGTERM when its loop does, so a rank that computes would continue computing.
    """
    signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))  # runs what is to run at exit
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
