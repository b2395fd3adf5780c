"""The best validation so far, patience, and divergence: from numbers alone. Runs anywhere.

Every rank has the same numbers, sums over all ranks, and so decides the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gpupool.core.options.named_measures import less_is_better
from gpupool.core.wire.events import StepEvent, WarningEvent

_LOWER = "Try a smaller lr, warmup= or clip="


class EarlyStopping:
    """Follows validations and steps, one after the other.

    Args:
        objective: of the values of a validation, the one that counts.
        patience: it is over when so many validations in a row were not better; None: never.
    """

    def __init__(self, objective: str = "loss", patience: int | None = None) -> None:
        self.objective, self._patience = objective, patience
        self.best: dict[str, float] = {}
        """The values of the best validation; {} before the first that is no NaN."""
        self.best_step = -1
        self._num_worse = 0

    def add_validation(self, step: int, values: Mapping[str, float]) -> bool:
        """Add the values of a validation; whether they are the best so far."""
        if not self._is_better(values[self.objective], self.best.get(self.objective, math.nan)):
            self._num_worse += 1
            return False
        self.best, self.best_step, self._num_worse = dict(values), step, 0
        return True

    def _is_better(self, new: float, old: float) -> bool:
        if math.isnan(new) or math.isnan(old):  # NaN is never better, any number is than NaN
            return not math.isnan(new)
        return new < old if less_is_better(self.objective) else new > old

    @property
    def is_patience_over(self) -> bool:
        """Whether the last `patience` validations were not better."""
        return self._patience is not None and self._num_worse >= self._patience

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint; its keys are the file's format."""
        return {
            "best": dict(self.best),
            "best_step": self.best_step,
            "num_worse": self._num_worse,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue another one; what it found best counts only by the same objective."""
        # With another objective, the best so far and its patience mean nothing.
        if self.objective in state["best"] or not state["best"]:
            self.best, self.best_step = dict(state["best"]), state["best_step"]
            self._num_worse = state["num_worse"]


def loss_warning(steps: Sequence[StepEvent]) -> WarningEvent | None:
    """The warning of the first of these steps whose loss is NaN or infinite."""
    for one in steps:
        if not math.isfinite(one.loss):
            became = "NaN" if math.isnan(one.loss) else "infinite"
            said = f"Loss became {became} at step {one.step}: training diverged. {_LOWER}."
            return WarningEvent("not finite", said, one.step)
    return None


def weights_warning(step: int) -> WarningEvent:
    """The warning where weights are NaN or infinite, which the loss did not show yet."""
    return WarningEvent(
        "not finite",
        f"Weights became NaN or infinite by step {step}: training diverged. {_LOWER}.",
        step,
    )
