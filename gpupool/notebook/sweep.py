"""`gpupool.sweep`: search a space of parameters, a trial on each rank, and show it. Client."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from gpupool.notebook.sweep_view import SweepView
from gpupool.training.sweep.result import SweepResult
from gpupool.training.sweep.sweep import run_sweep


def sweep(
    objective: Callable[[dict[str, Any]], Any],
    space: Mapping[str, Any],
    *,
    trials: int | None = None,
    sampler: Any = "tpe",
    pruner: Any = None,
    direction: str = "minimize",
    metric: str | None = None,
    storage: str | os.PathLike[str] | None = None,
    name: str | None = None,
    seed: int | None = None,
    on: str = "ranks",
) -> SweepResult:
    """Search `space` for the parameters that are best for `objective`, and show how it goes.

    A pool is started if none runs. Each trial has one rank with its device; Optuna (`pip install
    gpupool[sweep]`) chooses its parameters in the notebook. A trial that raises has failed, the
    others go on. The notebook's stop button, and Interrupt beside the table, end it all; what is
    known is returned.

    Args:
        objective: (params) -> value of the metric; `gpupool.report(step, loss=...)` draws its way.
        space: {name: a list of values, a range, (low, high), `gpupool.log(1e-5, 1e-1)`}.
        trials: how many there are in all; of a "grid" all combinations, unless it is given.
        sampler: "tpe", "gp" (Gaussian process), "random", "grid", or one of Optuna's.
        pruner: "median", "hyperband", "successive_halving", or one of Optuna's: ends weak trials.
        direction: "minimize" or "maximize" the metric.
        metric: its name among what is reported; needed where several values are.
        storage: a file, a URL of a database, or s3://, where a sweep of this `name` continues after
            the notebook has died.
        seed: of the sampler.
        on: "notebook" runs trials here, one by one, for an objective that calls `gpupool.train`.

    Raises:
        OptionsError, DataError: an argument is wrong, or the storage; or Optuna is not installed.
        SpmdError: the first trials have all failed.
    """
    __tracebackhide__ = True
    how: dict[str, Any] = {"sampler": sampler, "pruner": pruner, "direction": direction}
    how |= {"metric": metric, "storage": storage, "name": name, "seed": seed, "on": on}
    return run_sweep(None, objective, space, trials=trials, show=SweepView(), **how)
