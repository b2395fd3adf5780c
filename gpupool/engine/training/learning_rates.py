"""The learning rate of each step: the schedule's, or one that a callback has set. Runs on engines.

Schedules are closed forms (`core/options/schedule.py`). Rates that callbacks have set depend on how
training goes, and so are a state, which checkpoints keep.
Every rank has the same numbers, and so the same rates.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gpupool.core.errors import TrainingError
from gpupool.core.options.schedule import lr_factor
from gpupool.core.options.training_options import TrainingOptions


class LearningRates:
    """Gives the groups of an optimizer the rates of each step; the same on every rank.

    A rate that a callback sets in a group replaces the schedule there, from the next step on.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: TrainingOptions) -> None:
        self._optimizer, self._options = optimizer, options
        self._held: list[float | None] = [None] * len(optimizer.param_groups)

    def set(self, step: int, steps_per_epoch: int, epoch: int) -> float:
        """Give each group the rate of this step; returns that of a group with factor 1."""
        lr = self._options.lr * lr_factor(self._options, step, steps_per_epoch, epoch)
        for group, held in zip(self._optimizer.param_groups, self._held, strict=True):
            group["lr"] = lr * group["lr_factor"] if held is None else held
        first, held = self._optimizer.param_groups[0], self._held[0]
        return lr if held is None else held / (first["lr_factor"] or 1.0)

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
        return {"held": list(self._held), "lr": self._options.lr}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue another one; who resumes with another `lr` does not want the rates held."""
        if state["lr"] != self._options.lr:
            return
        self._held = list(state["held"])
        for group, held in zip(self._optimizer.param_groups, self._held, strict=True):
            group["lr"] = group["lr"] if held is None else held
