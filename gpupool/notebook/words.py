"""The words and numbers beside the curves of a training, as text. Pure; runs on the client."""

from __future__ import annotations

from gpupool.training.history import TrainingHistory

Table = list[tuple[str, list[tuple[str, str]]]]


def headline(history: TrainingHistory, status: str | None = None) -> str:
    """What goes on, changing once an epoch only: it is read aloud by screen readers.

    `status` overrides that of the history.
    """
    status = status or history.status
    last = history.steps[-1] if history.steps else None
    start = history.start
    if status == "failed":
        return f"Failed: {shortened(history.error)}"
    if status == "stopping":
        return "Stopping at the next step"
    if start is None:
        return "Starting"
    if status == "finished":
        epochs = "1 epoch" if start.num_epochs == 1 else f"{start.num_epochs} epochs"
        return f"Finished: {epochs} in {duration(history.elapsed_s)}"
    if status == "stopped":
        return f"Stopped after step {number(len(history.steps))} of {number(history.num_steps)}"
    return f"Training: epoch {last.epoch if last else 1} of {start.num_epochs}"


def remaining(history: TrainingHistory) -> str:
    """The share done and the time left, as "62 % · about 1 min 10 s left"."""
    parts = [f"{int(100 * history.progress)} %"]
    left = None if history.is_over else history.eta_s
    if left is not None:
        parts.append(f"about {duration(left)} left" if left >= 10 else "less than 10 s left")
    return " · ".join(parts)


def table(history: TrainingHistory) -> Table:
    """The column beside the plots: (section, [(label, value), ...]), the same rows all the time."""
    return [
        ("Results", _results(history)),
        ("Training time", _times(history)),
        ("Training cycle", _cycle(history)),
        ("Data", _data(history)),
        ("Other", _other(history)),
    ]


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


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> duration(8.24), duration(70), duration(7500)
    ('8.2 s', '1 min 10 s', '2 h 5 min')
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def number(value: float) -> str:
    """A count with thin spaces between thousands."""
    return f"{value:,.0f}".replace(",", "\u202f")


def percent(share: float | None) -> str:
    """A share (0..1) in percent; a dash where there is none."""
    return "–" if share is None else f"{share:.1%}".replace("%", " %")


def shortened(text: str, limit: int = 200) -> str:
    """The first line of `text`, cut to `limit` characters."""
    line = text.strip().split("\n")[0] or "no message"
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _results(history: TrainingHistory) -> list[tuple[str, str]]:
    value = history.validations[-1] if history.validations else None
    last = history.steps[-1] if history.steps else None
    rows = [
        ("Validation loss", f"{value.loss:.4g}" if value else "–"),
        ("Training loss", f"{last.loss:.4g}" if last else "–"),
    ]
    if last and last.accuracy is not None:
        rows.insert(0, ("Validation accuracy", percent(value.accuracy if value else None)))
        rows.insert(2, ("Training accuracy", percent(last.accuracy)))
    return rows


def _times(history: TrainingHistory) -> list[tuple[str, str]]:
    left = None if history.is_over else history.eta_s
    return [
        ("Elapsed", duration(history.elapsed_s)),
        ("Throughput", f"{number(history.throughput)} images/s" if history.steps else "–"),
        ("Time left", "–" if left is None else duration(left)),
    ]


def _cycle(history: TrainingHistory) -> list[tuple[str, str]]:
    start, last = history.start, history.steps[-1] if history.steps else None
    return [
        ("Epoch", f"{last.epoch if last else 0} of {start.num_epochs}" if start else "–"),
        ("Step", f"{number(len(history.steps))} of {number(history.num_steps)}" if start else "–"),
        ("Steps per epoch", number(start.steps_per_epoch) if start else "–"),
    ]


def _other(history: TrainingHistory) -> list[tuple[str, str]]:
    start, last = history.start, history.steps[-1] if history.steps else None
    return [
        ("Ranks", f"{start.world_size} × {start.device}" if start else "–"),
        ("Backend", start.backend if start else "–"),
        ("Global batch", global_batch(start.batch_size, start.world_size) if start else "–"),
        ("Learning rate", f"{last.lr:.3g}" if last else "–"),
    ]


def _data(history: TrainingHistory) -> list[tuple[str, str]]:
    reads = history.reads
    retried = number(reads.num_retried) + (f" ({reads.reason})" if reads.reason else "")
    cached = reads.cached_share
    return [
        ("Wait", f"{100 * history.data_wait_share:.0f} %" if history.steps else "–"),
        ("Reads retried", retried if reads.num_retried else "–"),
        ("Samples skipped", number(reads.num_skipped) if reads.num_skipped else "–"),
        ("From the cache", "–" if cached is None else f"{100 * cached:.0f} %"),
    ]


def global_batch(batch_size: int, world_size: int) -> str:
    """The global batch as shares.

    >>> global_batch(512, 4), global_batch(100, 3)
    ('512 = 4 × 128', '100 on 3 ranks')
    """
    share, rest = divmod(batch_size, world_size)
    return (
        f"{batch_size} on {world_size} ranks" if rest else f"{batch_size} = {world_size} × {share}"
    )
