"""Which rank this process is, and its pool's folder. Runs on engines."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

from gpupool.core.machine.topology import Rank
from gpupool.core.wire import environ


@functools.cache  # a cell may clear the environment
def this_rank() -> Rank:
    """This engine's place; its `gpu` is None."""
    return Rank(**json.loads(os.environ[environ.RANK]))


@functools.cache
def pool_folder() -> Path:
    return Path(os.environ[environ.POOL_FOLDER])
