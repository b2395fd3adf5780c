"""The best validation so far, and patience: from numbers alone. Runs anywhere.

Every rank has the same numbers, sums over all ranks, and so decides the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gpupool.core.options.named_measures import less_is_better


class EarlyStopping:
    """Follows validations, one after the other.

    Args:
        objective: of the values of a validation, the one that counts.
        patience: it is over when so many validations in a row were not better; None: never.
    """

    def __init__(self, objective: str = "loss", patience: int | None = None) -> None:
        self.objective, self._patience = objective, patience
        self.best: dict[str, float] = {}
        """The values of the best validation; {} before the first that is no NaN."""
        self._num_worse = 0

    def add_validation(self, values: Mapping[str, float]) -> bool:
        """Add the values of a validation; whether they are the best so far."""
        new, old = values[self.objective], self.best.get(self.objective, math.nan)
        if math.isnan(new) or math.isnan(old):  # NaN is never better, any number is than NaN
            is_better = not math.isnan(new)
        else:
            is_better = new < old if less_is_better(self.objective) else new > old
        self._num_worse = 0 if is_better else self._num_worse + 1
        if is_better:
            self.best = dict(values)
        return is_better

    @property
    def is_patience_over(self) -> bool:
        """Whether the last `patience` validations were not better."""
        return self._patience is not None and self._num_worse >= self._patience

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint; its keys are the file's format."""
        return {"best": self.best, "num_worse": self._num_worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue another one; what it found best counts only by the same objective."""
        if self.objective in state["best"] or not state["best"]:
            self.best, self._num_worse = dict(state["best"]), state["num_worse"]
