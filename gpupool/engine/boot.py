"""Become an engine: `python -m gpupool.engine.boot`. Runs on engines, before anything else.

The device was pinned by the environment this process was started with, so that neither torch nor
anything else can see another GPU. torch is imported before registering: an engine that counts as
ready is ready.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from gpupool.engine import here


def this_rank() -> dict[str, Any]:
    """This engine's rank, world_size, local_rank, node_rank, host, device, gpu and num_threads."""
    return here.rank or dict(json.loads(os.environ["GPUPOOL_RANK"]))


def main() -> None:
    """Import torch, register with the controller, serve until told to stop."""
    # A segfault leaves its stack in the log, which the agent reads. The duplicate stays the log:
    # the kernel turns descriptor 2 into a pipe to itself, and nobody reads that after a crash.
    faulthandler.enable(os.dup(2), all_threads=False)
    rank = this_rank()

    import torch

    torch.set_num_threads(rank["num_threads"])
    from ipyparallel.engine.app import IPEngine

    sys.argv[0] = "gpupool-engine"
    _wait_for_whole_file(Path(sys.argv[1].removeprefix("--file=")))
    IPEngine.launch_instance()


def _wait_for_whole_file(connection_file: Path) -> None:
    """The controller writes in place, and an engine that reads half a file ends at once.

    After a minute IPEngine goes on and says what is missing.
    """
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            json.loads(connection_file.read_text())
            return
        except (FileNotFoundError, ValueError):
            time.sleep(0.02)


if __name__ == "__main__":
    main()
