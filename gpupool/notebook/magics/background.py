"""`--nowait` cells that nobody has asked for: no error of theirs is lost. Runs on the client."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from gpupool.spmd.cell import SpmdRun

_runs: list[SpmdRun] = []


def watch(run: SpmdRun) -> None:
    """Have the error of `run` reported below a later cell, unless it is asked for its result."""
    _runs.append(run)


def register(shell: Any) -> None:
    """Look after each cell."""
    unregister(shell)
    shell.events.register("post_run_cell", _report)


def unregister(shell: Any) -> None:
    """Look no more, until the extension is loaded again."""
    with contextlib.suppress(ValueError):  # it was not
        shell.events.unregister("post_run_cell", _report)


def _report(result: Any) -> None:
    # A copy, as runs are removed while it is walked through.
    for run in list(_runs):
        if run.asked or run.done():
            _runs.remove(run)
        if run.done() and not run.asked and run.error is not None:
            print(f"{run.name} (--nowait) has failed: {run.error}", file=sys.stderr)
            print("Its .result() shows the output and the traceback.", file=sys.stderr)
