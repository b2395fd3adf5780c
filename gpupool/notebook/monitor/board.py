"""What a monitor shows of a training or of a loop, ready to draw. Pure; runs on the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpupool.core.formatting import NONE, duration, number
from gpupool.notebook.monitor import parts, words
from gpupool.notebook.monitor.curves import Curves
from gpupool.notebook.monitor.loop_history import LoopHistory
from gpupool.training.history import TrainingHistory

History = TrainingHistory | LoopHistory
_STATUS = {"failed": "ended by an error"}
_HINT = "To stop after the next report, press the stop button of the notebook."


@dataclass(frozen=True, slots=True)
class Board:
    """All that there is to draw.

    `parts` are HTML by name, `text` the same as text; `lost` is the headline if the kernel dies
    now. `stop` is the label of the button ("" without one), `hint` what to do where no page has
    buttons. `plots` are "view": looks, axes and what they show in words; and "lines": points.
    """

    parts: dict[str, str]
    text: str
    lost: str
    stop: str
    hint: str
    plots: dict[str, Any]


def board_of(history: History, curves: Curves | None = None, status: str = "") -> Board:
    """The state of a history.

    Args:
        curves: of the same training, so that only what is new is added.
        status: in the place of the history's own: a press that it has not noticed yet.
    """
    status = status or history.status
    if isinstance(history, LoopHistory):
        return _board_of_loop(history, status)
    headline, remaining = words.headline(history, status), words.remaining(history)
    view, lines = (curves or Curves()).take(history)
    clock = {"started_at": history.start.started_at if history.start else 0.0}
    return Board(
        parts={
            "header": parts.header(
                headline, history.progress, remaining, is_failed=status == "failed"
            ),
            "notices": parts.notices([words.notice(history), words.bottleneck(history)]),
            "tables": parts.tables(words.table(history)),
            "ranks": parts.ranks(history),
        },
        text=training_text(history),
        lost=f"Failed: {words.lost(history)}",
        stop="" if history.is_over else words.stop_label(history),
        hint="" if history.is_over else words.HINT,
        plots={"view": {**view, "clock": clock}, "lines": lines},
    )


def training_text(history: TrainingHistory) -> str:
    """The outcome in a few lines."""
    notice = words.notice(history)
    lines = [words.headline(history), *(f"  {line}" for line in notice.splitlines())]
    if history.start is None or not history.steps:
        return "\n".join(lines)
    for section, rows in words.table(history):
        shown = [f"{label.lower()} {value}" for label, value in rows if value != NONE]
        if shown:
            lines.append(f"  {section + ':':<16}{', '.join(shown)}")
    rank, note = words.slowest(history)
    if note:
        lines.append(f"  {words.rank_title(history) + ':':<16}rank {rank} is the {note}")
    return "\n".join(lines)


def _board_of_loop(history: LoopHistory, status: str) -> Board:
    event, step = history.event, number(history.step)
    state = "" if status == "running" else f": {_STATUS.get(status, status)}"
    done = f"step {step}" + (f" of {number(event.num_steps)}" if event.num_steps else "")
    facts = [*event.info.items(), ("Elapsed", duration(event.elapsed_s))]
    values = [(name, f"{value:.5g}") for name, value in history.latest.items()]
    sections = [("Values", values), ("Loop", [*facts, ("Ranks", str(event.world_size))])]
    view, lines = history.plots()
    headline, is_failed = event.title + state, status == "failed"
    return Board(
        parts={
            "header": parts.header(headline, history.progress, done, is_failed=is_failed),
            "tables": parts.tables([section for section in sections if section[1]]),
        },
        text=history.line(),
        lost=f"{event.title}: the kernel stopped at step {step}, and the loop with it",
        stop="Stop" if history.can_stop else "",
        hint=_HINT if history.can_stop else "",
        plots={"view": {**view, "clock": {"started_at": history.started_at}}, "lines": lines},
    )
