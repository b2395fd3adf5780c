"""A sweep with the usual arguments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpupool import Pool
from gpupool.training.sweep import SweepProgress, SweepResult, run_sweep

USUAL: dict[str, Any] = dict.fromkeys(("trials", "pruner", "metric", "storage", "name"))
USUAL |= {"sampler": "grid", "direction": "minimize", "seed": 0, "on": "ranks"}


def swept(
    pool: Pool, objective: Callable[..., Any], space: Mapping[str, Any], **given: Any
) -> SweepResult:
    """Sweep a grid, unless it is given otherwise; each trial is once in the result."""
    shown: list[str] = []

    def show(progress: SweepProgress) -> None:
        assert threading.current_thread() is threading.main_thread()
        shown.append(progress.status)

    result = run_sweep(pool, objective, space, **{"show": show, **USUAL, **given})
    numbers = {trial.number for trial in result.progress.trials}
    assert len(numbers) == len(result.progress.trials)
    assert shown[-1] == result.progress.status
    return result


def states(result: SweepResult) -> list[str]:
    return [trial.state for trial in result.progress.trials]


def noting(folder: Path, before: Callable[[Any], None] = lambda x: None) -> Callable[..., float]:
    """An objective whose value is its x; it leaves a file for each time that it has run."""

    def objective(params: dict[str, Any]) -> float:
        import uuid

        before(params["x"])
        (folder / f"{params['x']}-{uuid.uuid4()}").touch()
        return float(params["x"])

    return objective


def noted(folder: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[0]) for path in folder.glob("[0-9]*-*"))
