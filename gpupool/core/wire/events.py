"""What training reports to the notebook: frozen events that cross as plain dicts. Runs anywhere.

Rank 0 sends them, and each rank its own `RankEvent`; the client folds them, in order, into a
`TrainingHistory` (`gpupool/training/history.py`). Times are seconds since the training started, on
rank 0's monotonic clock, so that no clock of one host is compared with another's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from gpupool.core.formatting import measured, percent
from gpupool.core.wire.monitor_event import MonitorEvent

PIECES = "gpupool_pieces"  # metadata of text of both streams: the lengths of its pieces, in turns


@dataclass(frozen=True, slots=True)
class StartEvent:
    """Training begins: what will be done.

    Where it begins again, everything that was reported before follows once more. `num_steps` are
    those of the whole training, 0 where that is not known, as `steps_per_epoch` is of a stream.
    `objective` is by what the best network is chosen ("loss", "accuracy", a metric), if any is.

    `devices` are those of the ranks that train, `ranks`, in this order: "cuda:0 NVIDIA H200", or
    "CPU". `validate_every` counts steps; 0: there is no validation; -1: one after every epoch, of a
    length that nobody knows. `patience` is 0 without one, `keep` "best" or "last". `started_at` is
    rank 0's wall clock, in seconds since 1970. `unit` is what a sample is: "images", or "samples".
    `metrics` are the names of those that validations have.
    """

    num_epochs: int
    steps_per_epoch: int
    num_samples: int
    batch_size: int
    world_size: int
    device: str
    backend: str
    num_steps: int = 0
    objective: str = ""
    devices: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    precision: str = "float32"
    validate_every: int = 0
    patience: int = 0
    keep: str = "last"
    started_at: float = 0.0
    unit: str = "samples"
    metrics: tuple[str, ...] = ()


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
    """The validation set after a step, from counts summed over all ranks.

    `metrics` are those asked for, by name. `is_best`: no validation before was better.
    """

    step: int
    epoch: int
    loss: float
    accuracy: float | None
    num_samples: int
    elapsed_s: float
    metrics: dict[str, float] = field(default_factory=dict)
    is_best: bool = False

    def __repr__(self) -> str:
        values = ", ".join(f"{name} {value}" for name, value in self.values())
        return f"Validation after step {self.step:,} (epoch {self.epoch}): {values}"

    def values(self) -> list[tuple[str, str]]:
        """What was measured, by name, in words."""
        found = {"accuracy": percent(self.accuracy)} if self.accuracy is not None else {}
        metrics = {name: measured(name, value) for name, value in self.metrics.items()}
        return [("loss", f"{self.loss:.4g}"), *(metrics | found).items()]


@dataclass(frozen=True, slots=True)
class WarningEvent:
    """Something the user should know at once; training continues, or ends automatically.

    `about` is "not finite" (divergence), "checkpoint" (it could not be written), "resume", "data"
    (waited for), or another word; `message` is one sentence; `step` the last one that was done.
    """

    about: str
    message: str
    step: int


@dataclass(frozen=True, slots=True)
class CheckpointEvent:
    """A checkpoint is complete at `url`: all that training holds after `step`.

    Training stood still for `stall_s`; to write it took `write_s` more, in the background. `reason`
    is why it was made: "epoch", "steps", "time", "end", "stop" or "failure".
    """

    step: int
    epoch: int
    url: str
    num_bytes: int
    stall_s: float
    write_s: float
    reason: str = "epoch"


@dataclass(frozen=True, slots=True)
class ResumeEvent:
    """Training resumes from the checkpoint at `url`, after `step`. It was made on `world_size`."""

    step: int
    epoch: int
    url: str
    world_size: int


@dataclass(frozen=True, slots=True)
class DataEvent:
    """What reading took since the last such event, over all ranks; only where there is news.

    `num_reads` came from the store, `num_cached` from the cache instead. `num_retried` reads were
    tried again; `reason` is why, on rank 0, the last time ("503 SlowDown"; "" if it had none).
    `num_skipped` samples were left out; `skipped` maps their URLs to what is wrong with them.
    `read_by` is what reads the training data on rank 0: "8 threads", "4 processes"; "" of
    datastores.
    """

    step: int
    epoch: int
    num_reads: int
    num_cached: int
    num_retried: int
    reason: str
    num_skipped: int
    skipped: dict[str, str]
    read_by: str = ""


@dataclass(frozen=True, slots=True)
class RankEvent:
    """How one rank fares; each sends its own about once a second while it trains, and at the end.

    `step` is the last one it has done. `work_s` is the median over the steps since the last such
    event of what a step takes this rank itself: data, forward, backward and optimizer, without what
    it waits for the other ranks. The rank with the longest is the one that all others wait for.
    `step_s` is the median of whole steps. Either is None where no step was made.

    `utilization` (0..1), memory and temperature are those of its GPU, whoever uses it. Of a rank on
    CPU: its CPU time over wall time times its threads; its resident memory, of the host's. None
    where it is not reported.
    """

    rank: int
    step: int
    work_s: float | None = None
    step_s: float | None = None
    utilization: float | None = None
    memory_bytes: int | None = None
    total_memory_bytes: int | None = None
    temperature_c: int | None = None


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """How far something is that is no training: `done` of `total` (0: nobody knows).

    `what` says it, such as "samples", of a pass over a data set by all ranks, or "Listing", which
    counts files. The last event has `done` equal to `total`, above 0.
    `elapsed_s` are seconds of training until then, where it is part of one (else 0).
    """

    what: str
    done: int
    total: int
    unit: str = "samples"
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EndEvent:
    """Training is over.

    `stopped_by` is "epochs" or "max_steps" (all was done), "user", "callback", "patience" or
    "diverged" (it ended early). The network that is kept is that after `kept_step`; -1: the last.
    """

    stopped_by: str
    step: int
    elapsed_s: float
    kept_step: int = -1


Event = (
    StartEvent
    | StepEvent
    | ValidationEvent
    | WarningEvent
    | CheckpointEvent
    | ResumeEvent
    | DataEvent
    | RankEvent
    | ProgressEvent
    | EndEvent
    | MonitorEvent
)

_KINDS: dict[str, type[Event]] = {
    "start": StartEvent,
    "step": StepEvent,
    "validation": ValidationEvent,
    "warning": WarningEvent,
    "checkpoint": CheckpointEvent,
    "resume": ResumeEvent,
    "data": DataEvent,
    "rank": RankEvent,
    "progress": ProgressEvent,
    "end": EndEvent,
    "monitor": MonitorEvent,
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
    fields = {name: _frozen(value) for name, value in data.items()}
    return _KINDS[fields.pop("kind")](**fields)


def _frozen(value: Any) -> Any:
    """Lists as tuples, which they were before a channel such as JSON."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
