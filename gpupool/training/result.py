"""What training leaves behind. Runs on the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpupool.core.options import TrainingOptions
from gpupool.training.history import TrainingHistory

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class TrainingResult:
    """The trained network and how it got there.

    `model` is an ordinary module on the CPU, a new one: the module given to `train` is as it was.
    """

    model: nn.Module
    history: TrainingHistory
    options: TrainingOptions

    @property
    def stopped_by(self) -> str:
        """ "epochs" when all epochs were done, "user" when stopped before."""
        return self.history.end.stopped_by if self.history.end else ""

    @property
    def skipped(self) -> dict[str, str]:
        """The URLs of samples that `on_error="skip"` has left out, and what is wrong with each.

        They are counted nowhere: "missing", "changed", "empty", "damaged", "animated" or
        "too large".
        """
        return dict(self.history.reads.skipped)

    @property
    def throughput(self) -> float:
        """Training samples per second over all ranks."""
        return self.history.throughput

    def __repr__(self) -> str:
        return f"TrainingResult({self.history.line()})"
