"""The table of ranks under the curves, as text and shares that are ready to draw. Pure; client."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from gpupool.core.formatting import NONE, format_ranks, milliseconds, of_memory
from gpupool.core.wire.events import RankEvent
from gpupool.training.history import TrainingHistory

COLUMNS = ("rank", "device", "utilization", "memory", "temp.", "own time/step")


@dataclass(frozen=True)
class RankRow:
    """One rank: all as text, and the two shares (0..1; None where nobody knows) that get a bar.

    `step` is what a step takes the rank itself, as a whole step takes them all the same; `note` is
    "slowest +37 %" of the one that the others wait for, "" of all others. See `COLUMNS`.
    """

    rank: str
    device: str
    utilization: float | None
    utilization_text: str
    memory: float | None
    memory_text: str
    temperature: str
    step: str
    note: str


def rank_rows(history: TrainingHistory) -> list[RankRow]:
    """A row for each rank that trains, also before its first report; none before the start."""
    start = history.start
    if start is None:
        return []
    ranks = start.ranks or tuple(sorted(history.ranks))
    devices = start.devices or (start.device,) * len(ranks)
    slowest = history.slowest
    notes = {slowest.rank: _slow(slowest.share)} if slowest else {}
    hosts = dict(zip(ranks, start.hosts, strict=False))  # host by host, as ranks are numbered
    return [
        _row(format_ranks([rank], hosts), device, history.ranks.get(rank), notes.get(rank, ""))
        for rank, device in zip(ranks, devices, strict=True)
    ]


def _slow(share: float) -> str:
    return f"slowest +{100 * share:.0f} %" if share < 2 else f"slowest, {1 + share:.0f}× slower"


def rank_title(history: TrainingHistory) -> str:
    """What the rows are: "GPUs", or "Ranks" where not all have one."""
    devices = history.start.devices if history.start else ()
    on_gpus = bool(devices) and all(device.startswith("cuda") for device in devices)
    return "GPUs" if on_gpus else "Ranks"


def rank_summary(history: TrainingHistory) -> str:
    """The rows in a few words: "mean utilization 93 %"; after the end, that these are the last."""
    rows = rank_rows(history)
    shares = [row.utilization for row in rows if row.utilization is not None]
    if history.is_over:
        return "at the end" if any(row.step != NONE for row in rows) else ""
    return f"mean utilization {100 * fmean(shares):.0f} %" if shares else ""


def _row(rank: str, device: str, event: RankEvent | None, note: str) -> RankRow:
    event = event or RankEvent(0, 0)
    used, total, share = event.memory_bytes, event.total_memory_bytes, event.utilization
    seconds = event.step_s if event.work_s is None else event.work_s
    return RankRow(
        rank=rank,
        device=device.replace("NVIDIA ", ""),
        utilization=share,
        utilization_text=NONE if share is None else f"{100 * share:.0f} %",
        memory=min(1.0, used / total) if used is not None and total else None,
        memory_text=of_memory(used, total),
        temperature=NONE if event.temperature_c is None else f"{event.temperature_c} °C",
        step=NONE if seconds is None else milliseconds(seconds),
        note=note,
    )
