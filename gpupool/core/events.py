"""What training tells the notebook: small frozen events that cross as plain dicts. Runs anywhere.

Rank 0 sends them; the client folds them, in order, into a `TrainingHistory`
(`gpupool/training/history.py`). Times are seconds since the training started, on rank 0's
monotonic clock, so that no clock of one host is compared with another's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StartEvent:
    """Training begins: what will be done."""

    num_epochs: int
    steps_per_epoch: int
    num_samples: int
    batch_size: int
    world_size: int
    device: str
    backend: str


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One optimizer step: loss and accuracy are means over the whole global batch.

    `step` counts from 1 over all epochs, `epoch` from 1. `accuracy` is a fraction (0..1), or
    None where the targets are not class indices. `data_wait_s` is rank 0's wait for the batch.
    """

    step: int
    epoch: int
    loss: float
    accuracy: float | None
    lr: float
    num_samples: int
    elapsed_s: float
    data_wait_s: float


@dataclass(frozen=True, slots=True)
class ValidationEvent:
    """The validation set after an epoch, from counts summed over all ranks."""

    step: int
    epoch: int
    loss: float
    accuracy: float | None
    num_samples: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class DataEvent:
    """What reading took since the last such event, over all ranks; only where there is news.

    `num_reads` came from the store, `num_cached` from the cache instead. `num_retried` reads were
    tried again; `reason` is why, on rank 0, the last time ("503 SlowDown"; "" if it had none).
    `num_skipped` samples were left out; `skipped` maps their URLs to what is wrong with them.
    """

    step: int
    epoch: int
    num_reads: int
    num_cached: int
    num_retried: int
    reason: str
    num_skipped: int
    skipped: dict[str, str]


@dataclass(frozen=True, slots=True)
class EndEvent:
    """Training is over. `stopped_by` is "epochs" (all done) or "user" (stopped early)."""

    stopped_by: str
    step: int
    elapsed_s: float


Event = StartEvent | StepEvent | ValidationEvent | DataEvent | EndEvent

_KINDS: dict[str, type[Event]] = {
    "start": StartEvent,
    "step": StepEvent,
    "validation": ValidationEvent,
    "data": DataEvent,
    "end": EndEvent,
}
_NAMES: dict[type[Event], str] = {cls: name for name, cls in _KINDS.items()}


def to_dict(event: Event) -> dict[str, Any]:
    """The event as a dict of plain values, with its kind under "kind"."""
    return {"kind": _NAMES[type(event)], **asdict(event)}


def from_dict(data: dict[str, Any]) -> Event:
    """The event that `to_dict` turned into `data`.

    Raises:
        KeyError: an unknown kind, so client and engine run different versions of gpupool.
    """
    fields = dict(data)
    return _KINDS[fields.pop("kind")](**fields)
