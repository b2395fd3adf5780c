"""Functions of the user's that a training calls at six events. Runs on engines."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from gpupool.core.wire.events import StepEvent, ValidationEvent
from gpupool.engine.training.checkpoints import epoch_of
from gpupool.engine.training.run import Run

EVENTS = ("start", "step", "epoch", "validation", "checkpoint", "end")


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
    model: nn.Module
    optimizer: torch.optim.Optimizer
    rank: int
    world_size: int
    elapsed_s: float

    @property
    def loss(self) -> float | None:
        """Loss of the step that was reported last."""
        return None if self.last is None else self.last.loss

    @property
    def accuracy(self) -> float | None:
        """Accuracy (0..1) of the step that was reported last."""
        return None if self.last is None else self.last.accuracy


class Callbacks:
    """Calls `options.callbacks`, in their order.

    `wants_stop`: one has returned True on this rank.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._callbacks = tuple(run.options.callbacks)
        self.wants_stop = False

    def call(self, event: str) -> bool:
        """Call them all; returns, on every rank alike, whether training is to end now.

        After "step" the answer is in `wants_stop`, and comes with the next report: no rank
        waits.
        An error in a callback passes through, with a note that names it.
        """
        if not self._callbacks:
            return False
        info = self._info(event)  # made only where a callback sees it: it costs nothing otherwise
        for callback in self._callbacks:
            try:
                wish = callback(info)
            except Exception as error:
                name = getattr(callback, "__qualname__", type(callback).__name__)
                error.add_note(
                    f"in the callback {name}, at {event!r} after step {info.step}, on rank "
                    f"{info.rank}: callbacks run on ranks, where what the notebook has set up is "
                    'not; do that when info.event is "start"'
                )
                raise
            self.wants_stop |= wish is True
        if event == "step":
            return False
        # One rank's True ends training on all: else the others would wait in the next collective.
        world = self._run.world
        return bool(world.sum(torch.tensor(int(self.wants_stop), device=world.device)).item())

    def _info(self, event: str) -> CallbackInfo:
        run = self._run
        return CallbackInfo(
            event=event,
            step=run.step,
            epoch=epoch_of(run),
            lr=float(run.optimizer.param_groups[0]["lr"]),
            last=run.reporter.last_step,
            validation=run.reporter.last_validation,
            model=run.model,
            optimizer=run.optimizer,
            rank=run.world.rank,
            world_size=run.world.size,
            elapsed_s=run.reporter.elapsed_s,
        )
