"""The words and numbers beside the curves of a training, as text. Pure; runs on the client."""

from __future__ import annotations

from gpupool.core.formatting import (
    NONE,
    clock_time,
    done_of,
    duration,
    measured,
    number,
    percent,
    short_name,
    shortened,
)
from gpupool.core.wire.events import StartEvent
from gpupool.notebook.monitor.rank_words import COLUMNS as RANK_COLUMNS
from gpupool.notebook.monitor.rank_words import RankRow, rank_rows, rank_summary, rank_title
from gpupool.training.history import (
    TrainingHistory,
    after,
    best_of,
    ending,
    figure,
    many,
    no_improvement,
)

__all__ = [
    "RANK_COLUMNS",
    "RankRow",
    "duration",
    "number",
    "percent",
    "rank_rows",
    "rank_summary",
    "rank_title",
    "shortened",
]

Rows = list[tuple[str, str]]
Table = list[tuple[str, Rows]]

MAX_WARNINGS = 3
MAX_LABEL_CHARS = 25  # of a row of the table: what is longer has no room there
STOPPING = "Stopping after the current steps…"
HINT = "To stop, press the stop button of the notebook."


def headline(history: TrainingHistory, status: str | None = None) -> str:
    """What happens, changing a few times an epoch only: it is read aloud by screen readers.

    `status` overrides that of the history.
    """
    status = status or history.status
    last = history.steps[-1] if history.steps else None
    start = history.start
    if status == "failed":
        return f"Failed: {shortened(history.error)}"
    if status == "stopping":
        return (
            f"Stopping: {history.stage}" if history.stage else "Stopping after the current steps…"
        )
    # A checkpoint is read, and code compiled, after the StartEvent: still a start to the user.
    if start is None or (last is None and history.stage and status == "training"):
        return f"Starting: {history.stage}" if history.stage else "Starting"
    if status == "finished":
        return f"Finished: {_all(history)} in {duration(history.elapsed_s)}"
    if status == "stopped":
        if not history.steps:
            return f"Stopped before the first step{_why_stopped(history)}"
        return f"Stopped after step {_step(history)}{_why_stopped(history)}"
    aside = f", {history.stage}" if history.stage else ""
    return f"Training: epoch {last.epoch if last else 1} of {start.num_epochs}{aside}"


def lost(history: TrainingHistory) -> str:
    """What is said where the kernel has died now."""
    where = f"at step {number(len(history.steps))}" if history.steps else "before the first step"
    return f"The kernel stopped {where}, and the training with it."


def _all(history: TrainingHistory) -> str:
    """What a training that is finished has done."""
    is_cut = history.end is not None and history.end.stopped_by == "max_steps"
    num_epochs = history.start.num_epochs if history.start else 0
    num, unit = (len(history.steps), "step") if is_cut else (num_epochs, "epoch")
    return many(num, unit)


def _why_stopped(history: TrainingHistory) -> str:
    reasons = {
        "callback": " by a callback",
        "patience": f": {no_improvement(history)}",
        "diverged": ": training diverged",
    }
    return reasons.get(history.end.stopped_by, "") if history.end else ""


def _step(history: TrainingHistory) -> str:
    """The last step, and of how many, where that is known."""
    of = f" of {number(history.num_steps)}" if history.num_steps else ""
    return number(len(history.steps)) + of


def notice(history: TrainingHistory) -> str:
    """What should be known beside the numbers, a line each; the last few warnings."""
    warnings = [event.message for event in history.warnings[-MAX_WARNINGS:]]
    return "\n".join(filter(None, [history.notice, *history.restarts[-MAX_WARNINGS:], *warnings]))


def bottleneck(history: TrainingHistory) -> str:
    """What holds the training up, and what to change; "" if so little of it was waiting."""
    share = history.data_wait_share
    if history.data_wait_s < 1 or share <= 0.3:
        return ""
    return (
        f"Waiting for data: {100 * share:.0f} % of the time. Make the transform faster, keep the "
        "files on this host (ds.cached(limit_gib)), give each rank more cores, or try more "
        "workers=."
    )


def clock(history: TrainingHistory) -> dict[str, float | bool | None]:
    """The times as numbers, for a page that counts on between two reports; None: nobody knows."""
    return {
        "started_at": history.start.started_at if history.start else 0.0,
        "elapsed_s": history.elapsed_s,
        "remaining_s": None if history.is_over else history.eta_s,
        "running": history.start is not None and not history.is_over,
    }


def remaining(history: TrainingHistory) -> str:
    """The share done and the time left, as "62 % · about 1 min 10 s left".

    Of what happens beside the steps, how far that is: "12.3 of 98.0 MB".
    """
    aside = history.aside if history.stage else None
    if aside is not None and aside.total:
        return done_of(aside.done, aside.total, aside.unit)
    parts = [f"{int(100 * history.progress)} %"] if history.num_steps else []
    left = None if history.is_over else history.eta_s
    if left is not None:
        parts.append(f"about {duration(left)} left" if left >= 10 else "less than 10 s left")
    return " · ".join(parts)


def stop_label(history: TrainingHistory) -> str:
    """What the Stop button does: it keeps the best network where one is kept, else the last."""
    keeps_best = history.start is not None and history.start.keep == "best"
    return "Stop and keep best" if keeps_best else "Stop"


def table(history: TrainingHistory) -> Table:
    """The column beside the plots: (section, [(label, value), ...]).

    The start and the first step decide which rows there are: what never has anything to say
    is left out, and nothing jumps afterwards.
    """
    sections = [
        ("Results", _results(history)),
        ("Training time", _times(history)),
        ("Training cycle", _cycle(history)),
        ("Validation", _validation(history)),
        ("Data", _data(history)),
        ("Other", _other(history)),
        ("Options", list(history.options.items())),
    ]
    return [(title, rows) for title, rows in sections if rows]


def latest(history: TrainingHistory) -> dict[str, str]:
    """What each plot shows at its right end, in words, for those who cannot see it."""
    if not history.steps:
        return {"accuracy": "Accuracy: no step yet", "loss": "Loss: no step yet"}
    last = history.steps[-1]
    words = {
        "accuracy": f"Accuracy at step {last.step}: {percent(last.accuracy)}",
        "loss": f"Loss at step {last.step}: {last.loss:.4g}",
    }
    if history.validations:
        value = history.validations[-1]
        words["accuracy"] += f", validation {percent(value.accuracy)}"
        words["loss"] += f", validation {value.loss:.4g}"
    return words


def _results(history: TrainingHistory) -> Rows:
    value = history.validations[-1] if history.validations else None
    last = history.steps[-1] if history.steps else None
    # Before the first step nobody knows whether there is an accuracy: its rows are there, as its
    # plot is, and nothing moves when it comes.
    has_accuracy, validates = last is None or last.accuracy is not None, _validates(history)
    rows: Rows = []
    if has_accuracy and validates:
        rows.append(("Validation accuracy", percent(value.accuracy if value else None)))
    if validates:
        rows.append(("Validation loss", figure(value.loss if value else None)))
        names = history.start.metrics if history.start else ()
        metrics = value.metrics if value else dict.fromkeys(names)
        rows += [
            (_label(name), measured(name, one))
            for name, one in metrics.items()
            if name != "accuracy" or not has_accuracy
        ]
    if has_accuracy:
        rows.append(("Training accuracy", percent(last.accuracy if last else None)))
    rows.append(("Training loss", figure(last.loss if last else None)))
    if validates and _has_best(history):
        rows.append(("Best validation", best_of(history)))
    return [*rows, ("Stop reason", ending(history))]


def _label(metric: str) -> str:
    """What a metric of validations is called in the table, whose labels must not become equal."""
    label = f"Validation {metric}"
    return label if len(label) <= MAX_LABEL_CHARS else short_name(metric, MAX_LABEL_CHARS)


def _validates(history: TrainingHistory) -> bool:
    return bool(history.validations or (history.start and history.start.validate_every))


def _has_best(history: TrainingHistory) -> bool:
    return bool(history.best or (history.start and history.start.objective))


def _times(history: TrainingHistory) -> Rows:
    start, left = history.start, None if history.is_over else history.eta_s
    unit = start.unit if start else "samples"
    begun = [("Start", clock_time(start.started_at))] if start and start.started_at else []
    return [
        *begun,
        ("Elapsed", duration(history.elapsed_s)),
        ("Time left", NONE if left is None else duration(left)),
        ("Throughput", f"{number(history.throughput)} {unit}/s" if history.steps else NONE),
    ]


def _cycle(history: TrainingHistory) -> Rows:
    start, last = history.start, history.steps[-1] if history.steps else None
    rows = [
        ("Epoch", f"{last.epoch if last else 0} of {start.num_epochs}" if start else NONE),
        ("Step", _step(history) if start else NONE),
    ]
    if start is None or start.steps_per_epoch:  # of a stream nobody knows
        rows.append(("Steps per epoch", number(start.steps_per_epoch) if start else NONE))
    return rows


def _validation(history: TrainingHistory) -> Rows:
    start = history.start
    if start is None or not start.validate_every:
        return []
    every = start.validate_every
    is_epoch = every < 0 or every == start.steps_per_epoch
    rows = [("Frequency", "every epoch" if is_epoch else f"every {number(every)} steps")]
    if start.patience:
        rows.append(("Patience", f"{history.num_without_improvement} of {start.patience}"))
    return rows


def _data(history: TrainingHistory) -> Rows:
    reads = history.reads
    retried = number(reads.num_retried) + (f" ({reads.reason})" if reads.reason else "")
    rows = [
        (
            "Waiting for data",
            f"{100 * history.data_wait_share:.0f} % of the time" if history.steps else NONE,
        )
    ]
    if reads.read_by:
        rows.append(("Read by", reads.read_by))
    if reads.num_retried:
        rows.append(("Reads retried", retried))
    if reads.num_skipped:
        rows.append(("Samples skipped", number(reads.num_skipped)))
    return rows


def _other(history: TrainingHistory) -> Rows:
    start = history.start
    if start is None:
        return []
    backend = {"nccl": "NCCL", "none": ""}.get(start.backend, start.backend)
    rows = [
        ("Hardware", f"{start.world_size} × {start.device.removeprefix('NVIDIA ')}"),
        ("Backend", ", ".join(filter(None, [backend, start.precision]))),
        ("Global batch", _global_batch(start)),
        ("Learning rate", f"{history.steps[-1].lr:.3g}" if history.steps else NONE),
    ]
    if history.checkpoint:
        rows.append(("Checkpoint", after(history.checkpoint)))
    if history.resumed is not None:
        rows.append(("Resumed", after(history.resumed)))
    return rows


def _global_batch(start: StartEvent) -> str:
    """The global batch as shares: "512 = 4 × 128"."""
    size, num = start.batch_size, start.world_size
    if num == 1:
        return number(size)
    return f"{size} on {num} ranks" if size % num else f"{size} = {num} × {size // num}"
