"""What training reports to the notebook: frozen events that cross as plain dicts. Runs anywhere.

Rank 0 sends them, and each rank its own `RankEvent`; the client folds them, in order, into a
`TrainingHistory` (`gpupool/training/history.py`). Times are seconds since the training started, on
rank 0's monotonic clock, so that no clock of one host is compared with another's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

OVER = ("finished", "stopped", "failed")  # how a loop of the user's ends
Row = tuple[int, float, dict[str, float]]
"""The step, the seconds since the monitor was made, and the values recorded, by metric."""


@dataclass(frozen=True, slots=True)
class Event:
    """Any of those below."""


@dataclass(frozen=True, slots=True)
class StartEvent(Event):
    """What will be done; where training begins again, all that was reported follows once more.

    `num_steps` and `steps_per_epoch` are 0 where that is not known, as of a stream. The best
    network, if any, is chosen by `objective`. `devices` are those of `ranks`, in this order, and
    `hosts` where these are, if the pool is on several. `validate_every` counts steps; 0: there is
    no validation; -1: one after every epoch, of a length that nobody knows. `started_at` is rank
    0's wall clock. `unit` is what a sample is.
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
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepEvent(Event):
    """One optimizer step: loss and accuracy (0..1, of classes) are means over the global batch."""

    step: int  # from 1, over all epochs
    epoch: int
    loss: float
    accuracy: float | None
    lr: float
    num_samples: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class ValidationEvent(Event):
    """The validation set after a step, from counts summed over all ranks."""

    step: int
    epoch: int
    loss: float
    accuracy: float | None
    num_samples: int
    elapsed_s: float
    metrics: dict[str, float] = field(default_factory=dict)
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class WarningEvent(Event):
    """Something the user should know at once, in one sentence."""

    message: str
    step: int


@dataclass(frozen=True, slots=True)
class CheckpointEvent(Event):
    """A checkpoint is complete at `url`: all that training holds after `step`."""

    step: int
    url: str


@dataclass(frozen=True, slots=True)
class ResumeEvent(Event):
    """Training resumes from the checkpoint at `url`, after `step`."""

    step: int
    url: str


@dataclass(frozen=True, slots=True)
class DataEvent(Event):
    """What reading took since the last such event, over all ranks; only where there is news.

    `reason` is why reads were tried again, on rank 0, the last time ("503 SlowDown"). `skipped`
    maps URLs of samples to what is wrong with them. `read_by` is what reads the training data on
    rank 0: "8 workers"; "" of datastores.
    """

    step: int
    epoch: int
    num_retried: int
    reason: str
    num_skipped: int
    skipped: dict[str, str]
    read_by: str = ""


PHASES = (
    *("data", "compute", "exchange", "optimizer", "callbacks"),
    *("validating", "saving", "rest"),
)
"""What a rank spends its time on: it waits for its batch; computes forward and backward; waits for
the gradients of the others and for those on their way; steps; calls the user's functions ..."""


@dataclass(frozen=True, slots=True)
class RankEvent(Event):
    """How one rank fares; each sends its own about once a second while it trains, and at the end.

    `step_s` is the median of whole steps since the last such event, `work_s` without the waits for
    others: they wait for the rank with the longest. `utilization` (0..1), memory and temperature
    are those of its GPU, whoever uses it; of a rank on CPU, those of its process. `spent` maps
    `PHASES` to the seconds of its training so far, but for its first step, which sets things up.
    """

    rank: int
    step: int
    work_s: float | None = None
    step_s: float | None = None
    utilization: float | None = None
    memory_bytes: int | None = None
    total_memory_bytes: int | None = None
    temperature_c: int | None = None
    spent: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProgressEvent(Event):
    """How far something is that is no training ("predict", "Listing"): `done` of `total`.

    `total` is 0 where nobody knows. The last event has `done` equal to `total`, above 0.
    `elapsed_s` are seconds of training until then, where it is part of one (else 0).
    """

    what: str
    done: int
    total: int
    unit: str = "samples"
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EndEvent(Event):
    """Training is over, by "epochs" or "max_steps" (all was done), or early: by "user", "callback",
    "patience" or "diverged". The network that is kept is that after `kept_step`; -1: the last."""

    stopped_by: str
    step: int
    elapsed_s: float
    kept_step: int = -1


@dataclass(frozen=True, slots=True)
class MonitorEvent(Event):
    """News of a loop of the user's (`gpupool.monitor`). `number` sets those of a process apart.

    All but `rows` is the whole state each time. `groups` maps the title of a plot to its metrics;
    `num_steps` is 0 where nobody knows. `status` is "running", "stopping", "finished", "stopped" or
    "failed". `heeds_stop`: the loop asks whether to stop.
    """

    number: int
    title: str
    num_steps: int
    world_size: int
    groups: dict[str, list[str]]
    info: dict[str, str]
    status: str
    heeds_stop: bool
    elapsed_s: float
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ProfileEvent(Event):
    """The operators that took longest in the steps that were traced, the dearest first.

    Of each its name, the number of calls, and its own milliseconds on CPU and GPU.
    """

    rank: int
    num_steps: int
    operators: list[tuple[str, int, float, float]]


@dataclass(frozen=True, slots=True)
class ReportEvent(Event):
    """What a task has reported by `gpupool.report`."""

    step: int
    values: dict[str, float]


_KINDS = {name: kind for name, kind in list(globals().items()) if name.endswith("Event")}


def to_dict(event: Event) -> dict[str, Any]:
    return {"kind": type(event).__name__, **asdict(event)}


def from_dict(data: dict[str, Any]) -> Event:
    fields = dict(data)
    made: Event = _KINDS[fields.pop("kind")](**fields)
    return made
