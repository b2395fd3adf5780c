"""`--nowait` cells that nobody has asked for: no error of theirs is lost. Runs on the client."""

from __future__ import annotations

import sys
from typing import Any

from gpupool.spmd.cell import SpmdRun


def watch(run: SpmdRun, shell: Any) -> None:
    """Have the error of `run` reported below a later cell, unless it is asked for its result."""
    _hook(shell).runs.append(run)


def register(shell: Any) -> None:
    """Look after each cell."""
    _hook(shell).lasts = True


def unregister(shell: Any) -> None:
    """Look no more, but for the runs that are under way: `%reload_ext` loses no error of theirs."""
    hook = _hook(shell)
    hook.lasts = False
    hook.leave_if_done()


class _Hook:
    """What IPython calls after every cell; one that does not last goes with its last run."""

    def __init__(self, shell: Any) -> None:
        self.runs: list[SpmdRun] = []
        self.lasts = True
        self._shell = shell

    def __call__(self, result: Any) -> None:
        # A copy, as runs are removed while it is walked through.
        for run in list(self.runs):
            if run.asked or run.done():
                self.runs.remove(run)
            if run.done() and not run.asked and run.error is not None:
                print(f"{run.name} (--nowait) has failed: {run.error}", file=sys.stderr)
                print("Its .result() shows the output and the traceback.", file=sys.stderr)
        self.leave_if_done()

    def leave_if_done(self) -> None:
        """Be called no more if nothing is left to report."""
        if not self.lasts and not self.runs:
            self._shell.events.unregister("post_run_cell", self)


def _hook(shell: Any) -> _Hook:
    for hook in shell.events.callbacks["post_run_cell"]:
        # by its name: `%autoreload` makes the class again
        if type(hook).__name__ == _Hook.__name__ and type(hook).__module__ == __name__:
            return hook  # type: ignore[no-any-return]
    hook = _Hook(shell)
    shell.events.register("post_run_cell", hook)
    return hook
