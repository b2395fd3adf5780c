"""A training in words, which all its views share: headline, table, ranks. Pure; on the client."""

from __future__ import annotations

from statistics import fmean

from gpupool.core.formatting import (
    NONE,
    done_of,
    duration,
    format_ranks,
    measured,
    milliseconds,
    number,
    of_memory,
    percent,
    short_name,
    shortened,
)
from gpupool.core.wire.events import RankEvent
from gpupool.training.doctor import diagnose
from gpupool.training.history import TrainingHistory, after, best_of, figure, many, no_improvement

Rows = list[tuple[str, str]]
Table = list[tuple[str, Rows]]  # beside the plots: sections, and what they have

_TOLD = 0.2  # of the time
MAX_WARNINGS = 3
MAX_LABEL_CHARS = 25  # of a row of the table: there is no more room
RANK_COLUMNS = ("rank", "device", "utilization", "memory", "temp.", "own time/step")


def headline(history: TrainingHistory, status: str | None = None) -> str:
    """What happens, changing a few times an epoch only: it is read aloud by screen readers."""
    status, start, stage = status or history.status, history.start, history.stage
    if status == "failed":
        return f"Failed: {shortened(history.error)}"
    if status == "stopping":
        return f"Stopping: {stage}" if stage else "Stopping after the current steps…"
    # A checkpoint is read, and code compiled, after the StartEvent: still a start to the user.
    if start is None or (not history.steps and stage and status == "training"):
        return f"Starting: {stage}" if stage else "Starting"
    if status == "finished":
        is_cut = history.end is not None and history.end.stopped_by == "max_steps"
        done = many(len(history.steps), "step") if is_cut else many(start.num_epochs, "epoch")
        return f"Finished: {done} in {duration(history.elapsed_s)}"
    if status == "stopped":
        when = f"after step {_step(history)}" if history.steps else "before the first step"
        why = {
            "callback": " by a callback",
            "patience": f": {no_improvement(history)}",
            "diverged": ": training diverged",
        }
        return f"Stopped {when}{why.get(history.end.stopped_by, '') if history.end else ''}"
    epoch = history.steps[-1].epoch if history.steps else 1
    return f"Training: epoch {epoch} of {start.num_epochs}{f', {stage}' if stage else ''}"


def _step(history: TrainingHistory) -> str:
    of = f" of {number(history.num_steps)}" if history.num_steps else ""
    return number(len(history.steps)) + of


def notice(history: TrainingHistory) -> str:
    """What should be known beside the numbers, a line each; the last few warnings."""
    warnings = [event.message for event in history.warnings[-MAX_WARNINGS:]]
    return "\n".join(filter(None, [history.notice, *history.restarts[-MAX_WARNINGS:], *warnings]))


def bottleneck(history: TrainingHistory) -> str:
    """What holds the training up, and what to change; "" if that is less than a fifth of it."""
    found = diagnose(history)
    # Short steps are as they are: nobody has to be told while they run.
    if found.share < _TOLD or found.verdict == "too small":
        return ""
    return f"{found.sentence} Next: {found.next_step}"


def remaining(history: TrainingHistory) -> str:
    """ "62 % · about 1 min 10 s left"; of what happens beside the steps, "12.3 of 98.0 MB"."""
    aside = history.aside if history.stage else None
    if aside is not None and aside.total:
        return done_of(aside.done, aside.total, aside.unit)
    parts = [f"{int(100 * history.progress)} %"] if history.num_steps else []
    left = history.eta_s
    if left is not None:
        parts.append(f"about {duration(left)} left" if left >= 10 else "less than 10 s left")
    return " · ".join(parts)


def stop_label(history: TrainingHistory) -> str:
    keeps_best = history.start is not None and history.start.keep == "best"
    return "Stop and keep best" if keeps_best else "Stop"


def table(history: TrainingHistory) -> Table:
    """What has nothing to say, "", is left out. What will have a value has a dash until then, so
    that nothing jumps.
    """
    sections = [
        ("Results", _results(history)),
        ("Progress", _progress(history)),
        ("Setup", _setup(history)),
        ("Options", list(history.options.items())),
    ]
    shown = [(title, [row for row in rows if row[1]]) for title, rows in sections]
    return [(title, rows) for title, rows in shown if rows]


def _results(history: TrainingHistory) -> Rows:
    start, last = history.start, history.steps[-1] if history.steps else None
    value = history.validations[-1] if history.validations else None
    # Before the first step nobody knows whether there is an accuracy.
    has_accuracy = last is None or last.accuracy is not None
    rows = [("Training loss", figure(last.loss if last else None))]
    if has_accuracy:
        rows.append(("Training accuracy", percent(last.accuracy if last else None)))
    if value or (start and start.validate_every):
        rows.append(("Validation loss", figure(value.loss if value else None)))
        if has_accuracy:
            rows.append(("Validation accuracy", percent(value.accuracy if value else None)))
        metrics = value.metrics if value else dict.fromkeys(start.metrics if start else ())
        for name, one in metrics.items():
            if name != "accuracy" or not has_accuracy:
                label = short_name(f"Validation {name}", MAX_LABEL_CHARS)
                rows.append((label, measured(name, one)))
    if history.best or (start and start.objective and start.validate_every):
        rows.append(("Best validation", best_of(history)))
    return rows


def _progress(history: TrainingHistory) -> Rows:
    start, left = history.start, history.eta_s
    epoch = history.steps[-1].epoch if history.steps else 0
    rate = f"{number(history.throughput)} {start.unit if start else 'samples'}/s"
    return [
        ("Epoch", f"{epoch} of {start.num_epochs}" if start else NONE),
        ("Step", _step(history) if start else NONE),
        ("Elapsed", duration(history.elapsed_s)),
        ("Time left", NONE if left is None else duration(left)),
        ("Throughput", rate if history.steps else NONE),
        ("Reading", ", ".join(history.reads.words())),
    ]


def _setup(history: TrainingHistory) -> Rows:
    start = history.start
    if start is None:
        return []
    backend = {"nccl": "NCCL", "none": ""}.get(start.backend, start.backend)
    size, num = start.batch_size, start.world_size
    parts = f" = {num} × {size // num}" if size % num == 0 and num > 1 else ""
    return [
        ("Hardware", f"{num} × {start.device.removeprefix('NVIDIA ')}"),
        ("Backend", ", ".join(filter(None, [backend, start.precision]))),
        ("Global batch", f"{number(size)}{parts}"),
        ("Learning rate", f"{history.steps[-1].lr:.3g}" if history.steps else NONE),
        ("Read by", history.reads.read_by),
        ("Checkpoint", after(history.checkpoint) if history.checkpoint else ""),
        ("Resumed", after(history.resumed) if history.resumed else ""),
    ]


def training_text(history: TrainingHistory) -> str:
    said = [*notice(history).splitlines(), *filter(None, [bottleneck(history)])]
    lines = [headline(history), *(f"  {line}" for line in said)]
    if history.start is None or not history.steps:
        return "\n".join(lines)
    for section, rows in table(history):
        shown = [f"{label.lower()} {value}" for label, value in rows if value != NONE]
        if shown:
            lines.append(f"  {section + ':':<16}{', '.join(shown)}")
    return "\n".join(lines)


def rank_rows(history: TrainingHistory) -> dict[str, list[tuple[str, float | None]]]:
    """A row for each rank that trains, by its name, also before its first report.

    Behind the name, see `RANK_COLUMNS`, it has words, and the share (0..1) of which there is a bar.
    The last is what a step takes the rank itself, as a whole step takes them all the same.
    """
    start = history.start
    if start is None:
        return {}
    hosts = dict(zip(start.ranks, start.hosts, strict=False))  # where there are several
    ranks = start.ranks or tuple(sorted(history.ranks))
    devices = start.devices or (start.device,) * len(ranks)
    rows = {}
    for rank, device in zip(ranks, devices, strict=True):
        event = history.ranks.get(rank, RankEvent(0, 0))
        used, total, share = event.memory_bytes, event.total_memory_bytes, event.utilization
        seconds, degrees = event.work_s or event.step_s, event.temperature_c
        rows[format_ranks([rank], hosts)] = [
            (device.replace("NVIDIA ", ""), None),
            (NONE if share is None else f"{100 * share:.0f} %", share),
            (of_memory(used, total), None if used is None or not total else min(1.0, used / total)),
            (NONE if degrees is None else f"{degrees} °C", None),
            (NONE if seconds is None else milliseconds(seconds), None),
        ]
    return rows


def rank_summary(history: TrainingHistory) -> str:
    """The rows in a few words: "mean utilization 93 %"; after the end, that these are the last."""
    known = [event.utilization for event in history.ranks.values() if event.utilization is not None]
    if history.is_over:
        return "at the end" if history.ranks else ""
    return f"mean utilization {100 * fmean(known):.0f} %" if known else ""
