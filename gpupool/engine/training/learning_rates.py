"""The learning rate of each step: the schedule's, or one that a callback has set. Runs on engines.

Most schedules are closed forms (`core/options/schedule.py`). Two things depend on how training
goes, and so have a state, which checkpoints keep: "plateau", and rates that callbacks have set.
Every rank has the same numbers, and so the same rates.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gpupool.core.errors import TrainingError
from gpupool.core.options.named_measures import less_is_better
from gpupool.core.options.schedule import DROP_FACTOR, DROP_PATIENCE, PLATEAU_DELTA, lr_factor
from gpupool.core.options.training_options import TrainingOptions


class Plateau:
    """The factor of schedule="plateau", as torch's `ReduceLROnPlateau` has it.

    It drops where more than `drop_patience` validations in a row were not better than the best one
    before; better by `min_delta`, or unless given by one in 10,000.
    """

    def __init__(self, options: TrainingOptions) -> None:
        self._sign = 1.0 if less_is_better(options.objective) else -1.0
        self._min_delta = options.min_delta
        self._drop = DROP_FACTOR if options.drop_factor is None else options.drop_factor
        self._lowest = options.min_factor or 0.0
        patience = options.drop_patience
        self._patience = DROP_PATIENCE if patience is None else patience
        self.factor = 1.0
        self._best, self._num_worse = math.inf, 0

    def add_validation(self, value: float) -> None:
        """Add the objective's value of a validation; NaN is never better."""
        value *= self._sign  # less is better from here on
        least = self._min_delta or abs(self._best) * PLATEAU_DELTA
        # Of the first one `least` is infinite, and the difference no number.
        if value < self._best - least or value < self._best == math.inf:
            self._best, self._num_worse = value, 0
            return
        self._num_worse += 1
        if self._num_worse > self._patience:
            self.factor, self._num_worse = max(self.factor * self._drop, self._lowest), 0

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {"factor": self.factor, "best": self._best, "num_worse": self._num_worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue another one."""
        self.factor, self._best = state["factor"], state["best"]
        self._num_worse = state["num_worse"]


class LearningRates:
    """Gives the groups of an optimizer the rates of each step; the same on every rank.

    A rate that a callback sets in a group replaces the schedule there, from the next step on.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: TrainingOptions) -> None:
        self._optimizer, self._options = optimizer, options
        self._held: list[float | None] = [None] * len(optimizer.param_groups)
        self._plateau = Plateau(options) if options.schedule == "plateau" else None

    def set(self, step: int, steps_per_epoch: int, epoch: int) -> float:
        """Give each group the rate of this step; returns that of a group with factor 1."""
        lr = self._options.lr * lr_factor(self._options, step, steps_per_epoch, epoch)
        if self._plateau is not None:
            lr *= self._plateau.factor
        for group, held in zip(self._optimizer.param_groups, self._held, strict=True):
            group["lr"] = lr * group["lr_factor"] if held is None else held
        first, held = self._optimizer.param_groups[0], self._held[0]
        return lr if held is None else held / (first["lr_factor"] or 1.0)

    def add_validation(self, value: float) -> None:
        """Add the objective's value of a validation."""
        if self._plateau is not None:
            self._plateau.add_validation(value)

    def now(self) -> list[Any]:
        """The rate of each group, to be given to `hold_changed`."""
        return [group["lr"] for group in self._optimizer.param_groups]

    def hold_changed(self, before: Sequence[Any]) -> None:
        """Keep each rate that a callback has set since `before`."""
        for place, (old, new) in enumerate(zip(before, self.now(), strict=True)):
            # Another object, not another value: who sets the rate of this very step wants to keep
            # it, although the schedule would change it.
            if new is not old:
                self._held[place] = float(new)

    def bits(self) -> list[int]:
        """The rates that are held as whole numbers, which ranks compare exactly."""
        return [struct.unpack("<q", struct.pack("<d", rate or 0.0))[0] for rate in self._held]

    def check_equal(self, sums: list[int], num_ranks: int) -> None:
        """Raise TrainingError where this rank's rates are not those of the others.

        Args:
            sums: of `bits`, over the ranks.
        """
        # Sums of 64 bits wrap around. If not all are equal, some rank is not their mean.
        if any(
            (own * num_ranks - sum_) % 2**64 for own, sum_ in zip(self.bits(), sums, strict=True)
        ):
            raise TrainingError(
                "a callback has set another learning rate on this rank than on others: all ranks "
                "have to set the same one, from what is the same everywhere (info.step, info.loss, "
                "info.validation).",
                "other rate",
                "callbacks",
            )

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint; its keys are the file's format."""
        plateau = None if self._plateau is None else self._plateau.state_dict()
        return {"held": list(self._held), "plateau": plateau, "lr": self._options.lr}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue another one; who resumes with another `lr` does not want the rates held."""
        if self._plateau is not None and state["plateau"] is not None:
            self._plateau.load_state_dict(state["plateau"])
        if state["lr"] != self._options.lr:
            return
        self._held = list(state["held"])
        for group, held in zip(self._optimizer.param_groups, self._held, strict=True):
            group["lr"] = group["lr"] if held is None else held
