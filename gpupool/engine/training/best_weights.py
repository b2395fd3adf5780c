"""Which weights a training leaves behind. Runs on engines; knows only torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gpupool.core.errors import OptionsError
from gpupool.core.wire.events import ValidationEvent, WarningEvent
from gpupool.core.wire.state_dicts import load
from gpupool.engine.checkpoint.weights import copied
from gpupool.engine.training.run import Run


class BestWeights:
    """Keeps copies on the CPU of the best weights, and of the last ones that were finite.

    The latter are what is left where a NaN ends training.
    """

    def __init__(self, run: Run, *, has_validation: bool) -> None:
        keep = run.options.keep
        self._run, self._keeps_best = run, keep == "best" or (keep == "auto" and has_validation)
        self._finite: tuple[dict[str, Any], int] = {}, 0  # and the step that they are of

    def begin(self) -> None:
        """Training begins, or resumes: the weights are finite so far."""
        self._finite = copied(self._run.evaluated.state_dict()), self._run.step

    def add_validation(self, event: ValidationEvent) -> ValidationEvent:
        """The event, which says whether it is the best one; if so its weights are kept.

        Raises OptionsError, on every rank, if it lacks what the objective is.
        """
        run = self._run
        accuracy = {} if event.accuracy is None else {"accuracy": event.accuracy}
        values = {"loss": event.loss, **event.metrics, **accuracy}
        if run.options.objective not in values:
            raise OptionsError(
                f"objective={run.options.objective!r} is not among what a validation gives here: "
                f"{', '.join(values)}. Name it in metrics, or choose one of these."
            )
        if not run.early_stopping.add_validation(values):
            return event
        if self._keeps_best:
            run.kept, run.kept_step = copied(run.evaluated.state_dict()), event.step
        return replace(event, is_best=True)

    def check_finite(self, *, keeps: bool = False) -> bool:
        """Whether training may continue from these weights, of which a copy is kept if asked.

        If they are not finite, it ends.
        """
        run = self._run
        # Frozen ones do not change: a mask of -inf among them is no divergence.
        trained = [one for one in run.model.parameters() if one.requires_grad]
        if (
            not run.has_diverged
            and not torch.stack([one.isfinite().all() for one in trained]).all()
        ):
            run.reporter.emit(diverged("Weights", run.step))
            run.stopped_by = "diverged"
        elif keeps and not run.has_diverged:
            if run.kept_step == run.step:  # one copy serves both
                self._finite = run.kept, run.step
            else:
                self.begin()
        return not run.has_diverged

    def restore(self) -> None:
        """Give the network the weights that are kept."""
        run, (finite, step) = self._run, self._finite
        if self._keeps_best and run.kept:
            load(run.model, run.kept)
        elif run.has_diverged and finite:
            load(run.model, finite)
            run.kept_step = step
        elif run.ema is not None:
            load(run.model, run.ema.module.state_dict())


def diverged(what: str, step: int) -> WarningEvent:
    """The warning where loss or weights are NaN or infinite."""
    said = f"{what} became NaN or infinite by step {step}: training diverged."
    return WarningEvent("not finite", f"{said} Try a smaller lr, warmup= or clip=.", step)
