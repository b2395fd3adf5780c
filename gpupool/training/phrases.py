"""What a training was, in phrases that several views share. Pure; runs on the client."""

from __future__ import annotations

from gpupool.core.formatting import NONE, measured, number, percent
from gpupool.core.wire.events import CheckpointEvent, ResumeEvent, StartEvent, ValidationEvent
from gpupool.training.history import TrainingHistory


def ending(history: TrainingHistory) -> str:
    """Why it is over, in a few words."""
    end, start = history.end, history.start
    if history.status == "failed":
        return "failed"
    if end is None or start is None:
        return NONE
    epochs = "1 epoch" if start.num_epochs == 1 else f"all {number(start.num_epochs)} epochs"
    steps = "1 step" if end.step == 1 else f"all {number(end.step)} steps"
    return {
        "epochs": f"{epochs} completed",
        "max_steps": f"{steps} completed",
        "user": "stopped by you",
        "callback": "stopped by a callback",
        "patience": no_improvement(history),
        "diverged": "training diverged",
    }.get(end.stopped_by, end.stopped_by)


def no_improvement(history: TrainingHistory) -> str:
    """What patience has ended it for: "no improvement for 5 validations (patience)"."""
    patience = history.start.patience if history.start else 0
    num = patience or history.num_without_improvement
    lasted = f" for {num} validation{'' if num == 1 else 's'}" if num else ""
    return f"no improvement{lasted} (patience)"


def hardware(start: StartEvent) -> str:
    """What it runs on: "4 × H200"; of CPU ranks "2 × CPU"."""
    return f"{start.world_size} × {start.device.removeprefix('NVIDIA ')}"


def backend(start: StartEvent) -> str:
    """What carries the gradients, and in which numbers: "NCCL, bf16"."""
    carried = {"nccl": "NCCL", "none": ""}.get(start.backend, start.backend)
    return ", ".join(filter(None, [carried, start.precision]))


def global_batch(batch_size: int, world_size: int) -> str:
    """The global batch as shares.

    >>> global_batch(512, 4), global_batch(100, 3), global_batch(64, 1)
    ('512 = 4 × 128', '100 on 3 ranks', '64')
    """
    share, rest = divmod(batch_size, world_size)
    if world_size == 1:
        return f"{batch_size}"
    return (
        f"{batch_size} on {world_size} ranks" if rest else f"{batch_size} = {world_size} × {share}"
    )


def best_of(history: TrainingHistory) -> str:
    """The value that makes it the best, and when it was: "86.3 % after step 450"."""
    best, by = history.best, history.start.objective if history.start else ""
    if best is None:
        return NONE
    if by == "accuracy" and best.accuracy is not None and by not in best.metrics:
        return f"{percent(best.accuracy)} {after(best)}"
    value = best.metrics.get(by, best.loss if by == "loss" else None)
    return after(best) if value is None else f"{by} {measured(by, value)} {after(best)}"


def after(event: CheckpointEvent | ResumeEvent | ValidationEvent | None) -> str:
    """When it was; a dash if it never was."""
    return f"after step {number(event.step)}" if event is not None else NONE


def figure(value: float | None) -> str:
    """A loss in four digits; a dash where there is none."""
    return NONE if value is None else f"{value:.4g}"
