"""Functions of the user's that a training calls at six events. Runs on engines."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from gpupool.core.wire.events import StepEvent, ValidationEvent
from gpupool.engine.training.run import Run


@dataclass(frozen=True, slots=True)
class CallbackInfo:
    """What a callback of `TrainingOptions.callbacks` gets, on every rank.

    `event` is "start", "step", "epoch", "validation", "checkpoint" (one begins) or "end"; `step`
    and `epoch` count from 1 and are those that are complete (0 before the first). `last` is the
    step that was reported last, every 10 steps: its loss is a mean over all ranks;
    `validation` the last validation. Both are None before the first.

    `model` and `optimizer` are the ones that train, on this rank's device: what is changed in them
    must be changed on all ranks alike. The learning rate is `schedule`'s, which sets it anew in
    each step.

    At "start" of a training that is resumed, `step` is the one that it resumes after.
    """

    event: str
    step: int
    epoch: int
    lr: float
    last: StepEvent | None
    validation: ValidationEvent | None
    model: nn.Module = field(repr=False)
    optimizer: torch.optim.Optimizer = field(repr=False)
    rank: int
    world_size: int
    elapsed_s: float


class Callbacks:
    """Calls `options.callbacks`, in their order. `wants_stop`: one has said so, on this rank."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.wants_stop = False

    def call(self, event: str) -> None:
        """True from one of them ends training, on all ranks. After "step" they learn of it with the
        next report: no rank waits. An error passes through, with a note that names the callback."""
        run = self._run
        if not run.options.callbacks:
            return
        info = CallbackInfo(
            event=event,
            step=run.step,
            epoch=run.complete_epoch,
            lr=float(run.optimizer.param_groups[0]["lr"]),
            last=run.reporter.last_step,
            validation=run.reporter.last_validation,
            model=run.model,
            optimizer=run.optimizer,
            rank=run.world.rank,
            world_size=run.world.size,
            elapsed_s=run.reporter.elapsed_s,
        )
        for callback in run.options.callbacks:
            try:
                self.wants_stop |= callback(info) is True
            except Exception as error:
                name = getattr(callback, "__qualname__", type(callback).__name__)
                error.add_note(
                    f"in the callback {name}, at {event!r} after step {info.step}, on rank "
                    f"{info.rank}: callbacks run on ranks, where what the notebook has set up is "
                    'not; do that when info.event is "start"'
                )
                raise
        # One rank's True ends training on all: else the others would wait in the next collective.
        if event != "step":
            wishes = torch.tensor(int(self.wants_stop), device=run.world.device)
            if run.world.sum(wishes).item():
                run.stop("callback")
