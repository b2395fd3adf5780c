"""`--nowait` cells that nobody has asked for: no error of theirs is lost. Runs on the client."""

from __future__ import annotations

import sys
from typing import Any

from gpupool.spmd.cell import SpmdRun


def watch(run: SpmdRun, shell: Any) -> None:
    """Have the error of `run` told below a later cell, unless it is asked for its result."""
    _hook(shell).runs.append(run)


def register(shell: Any) -> None:
    """Look after each cell."""
    unregister(shell)
    shell.events.register("post_run_cell", _Hook())


def unregister(shell: Any) -> None:
    """Look no more."""
    for hook in [h for h in shell.events.callbacks["post_run_cell"] if isinstance(h, _Hook)]:
        shell.events.unregister("post_run_cell", hook)


class _Hook:
    """What IPython calls after every cell."""

    def __init__(self) -> None:
        self.runs: list[SpmdRun] = []

    def __call__(self, result: Any) -> None:
        for run in list(self.runs):
            if run.asked or run.done():
                self.runs.remove(run)
            if run.done() and not run.asked and run.error is not None:
                print(f"{run.name} (--nowait) has failed: {run.error}", file=sys.stderr)
                print("Its .result() shows the output and the traceback.", file=sys.stderr)


def _hook(shell: Any) -> _Hook:
    for hook in shell.events.callbacks["post_run_cell"]:
        if isinstance(hook, _Hook):
            return hook
    hook = _Hook()
    shell.events.register("post_run_cell", hook)
    return hook
