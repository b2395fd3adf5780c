"""What is known of a sweep: its trials, how far it is, and what came of it. Runs on the client."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpupool.core.formatting import measured, text_table

if TYPE_CHECKING:
    import optuna


@dataclass
class Trial:
    """One trial; its `state` is "running", "done", "pruned", "failed" or "stopped".

    `value` is of the metric, of a pruned trial the last; `course` what was reported of it, (step,
    value). `rank` is None in the notebook, and of trials of an earlier run. `error` is one line.
    """

    number: int
    params: dict[str, Any]
    state: str = "running"
    value: float | None = None
    course: list[tuple[int, float]] = field(default_factory=list)
    rank: int | None = None
    elapsed_s: float = 0.0
    error: str = ""


@dataclass
class SweepProgress:
    """How far a sweep is; its `status` is "running", "stopping", "finished" or "stopped".

    `num_trials` are all that it is to have, with those of an earlier run. `left_s` is None where
    nobody knows.
    """

    name: str
    metric: str
    direction: str
    trials: list[Trial]
    num_trials: int
    elapsed_s: float = 0.0
    left_s: float | None = None
    status: str = "running"

    @property
    def best(self) -> Trial | None:
        """The trial that is done with the best value; None if none is."""
        done = [one for one in self.trials if one.state == "done"]
        sign = 1 if self.direction == "maximize" else -1
        return max(done, key=lambda one: sign * (one.value or 0.0), default=None)


@dataclass(frozen=True, repr=False)
class SweepResult:
    """What came of a sweep; `study` is Optuna's, for its plots and all else that it can do."""

    progress: SweepProgress
    study: optuna.Study

    @property
    def best(self) -> Trial | None:
        """The best trial, with its `params` and `value`; None if none is done."""
        return self.progress.best

    def table(self) -> list[dict[str, Any]]:
        """A row for each trial, as `pandas.DataFrame` takes them."""
        metric = self.progress.metric
        return [
            {"trial": one.number, "state": one.state, **one.params, metric: one.value}
            | {"seconds": one.elapsed_s, "rank": one.rank, "error": one.error}
            for one in self.progress.trials
        ]

    def __repr__(self) -> str:
        rows = self.table()
        lines = [list(row) for row in rows[:1]]
        for row in rows:
            lines.append(
                [measured(n, v) if isinstance(v, float | None) else str(v) for n, v in row.items()]
            )
        return f"Sweep {self.progress.name!r}, {self.progress.status}\n{text_table(lines)}"
