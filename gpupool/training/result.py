"""What training leaves behind. Runs on the client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpupool.core.events import ValidationEvent
from gpupool.core.training_options import TrainingOptions
from gpupool.pool.output import RankOutput
from gpupool.training.history import TrainingHistory
from gpupool.training.summary import Summary, summarize

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class TrainingPlot:
    """The curves of a training, which IPython shows as a picture, or as text in a terminal."""

    history: TrainingHistory = field(repr=False)

    def __repr__(self) -> str:
        return f"TrainingPlot({self.history.line()})"


@dataclass(frozen=True)
class TrainingResult:
    """The trained network and how it got there.

    `model` is an ordinary module on the CPU, a new one: the module given to `train` is as it was.
    Its weights are the best ones or the last, as `options.keep` says. `options` are those that have
    held: `scale` is carried out.
    """

    model: nn.Module
    history: TrainingHistory
    options: TrainingOptions
    found: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What the ranks tell beside the events."""
    outputs: Mapping[int, RankOutput] = field(default_factory=dict, repr=False)
    """What each rank that trained has printed."""

    def text(self, rank: int) -> str:
        """What a rank that trained has printed."""
        return self.outputs[rank].text

    @property
    def stopped_by(self) -> str:
        """What ended it: "epochs" or "max_steps" (all was done), "user", "callback", "patience" or
        "diverged"."""
        return self.history.end.stopped_by if self.history.end else ""

    @property
    def best(self) -> ValidationEvent | None:
        """The best validation, None without one."""
        return self.history.best

    @property
    def kept_step(self) -> int:
        """The step after which `model` has its weights from."""
        end = self.history.end
        if end is None:
            return 0
        return end.step if end.kept_step < 0 else end.kept_step

    @property
    def warnings(self) -> list[str]:
        """What there was to be known: divergence, checkpoints that failed; a sentence each."""
        return [*self.history.restarts, *(event.message for event in self.history.warnings)]

    @property
    def checkpoint(self) -> str | None:
        """URL of the newest checkpoint."""
        return self.history.newest.url if self.history.newest else None

    @property
    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """(mean, std) that normalize="fit" has found: what `model` takes must be made so."""
        found = self.found.get("normalization")
        return None if found is None else (tuple(found[0]), tuple(found[1]))

    @property
    def skipped(self) -> dict[str, str]:
        """The URLs of samples that `on_error="skip"` has left out, and what is wrong with each.

        They are counted nowhere: "missing", "changed", "empty", "damaged", "animated" or
        "too large".
        """
        return dict(self.history.reads.skipped)

    def plot(self) -> TrainingPlot:
        """Loss and accuracy over the steps: the picture that the training has left."""
        return TrainingPlot(self.history)

    @property
    def throughput(self) -> float:
        """Training samples per second over all ranks."""
        return self.history.throughput

    def summary(self) -> Summary:
        """What was trained, on what, how long, and what came of it; `print` makes text of it."""
        return summarize(self)

    def __repr__(self) -> str:
        return str(self.summary())
