"""What a monitor shows of a training or of a loop, ready to draw. Pure; runs on the client."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from gpupool.core.formatting import NONE, clock_time, duration, number
from gpupool.core.monitor_lines import monitor_line
from gpupool.core.wire.events import OVER, MonitorEvent
from gpupool.notebook.monitor import words
from gpupool.notebook.monitor.curves import Lines, View, thinned, training_plots
from gpupool.notebook.monitor.doctor_view import shares_html
from gpupool.notebook.monitor.plots import legend, own_plot
from gpupool.notebook.monitor.svg import fitted_end
from gpupool.training.doctor import Shares
from gpupool.training.history import TrainingHistory

_STATUS = {"failed": "ended by an error"}


class LoopHistory:
    """One monitor: its last event, the last value of each metric, and their curves.

    Args:
        hears_stop: somebody waits for the loop, and passes on the press of a Stop button.
    """

    def __init__(self, event: MonitorEvent, *, hears_stop: bool = False) -> None:
        self.event, self.hears_stop = event, hears_stop
        self.started_at = time.time()
        self.step = 0
        self.first: int | None = None
        self.latest: dict[str, float] = {}
        self._curves: dict[str, dict[int, float]] = {}
        self._status = ""

    def add(self, event: MonitorEvent) -> None:
        """Add the next event, also one that comes after the end of the cell."""
        self.event, self._status = event, ""
        for step, _, values in event.rows:
            self.step = max(self.step, step)
            self.first = step if self.first is None else min(self.first, step)
            self.latest |= values
            for name, value in values.items():
                self._curves.setdefault(name, {})[step] = value

    def end(self) -> None:
        """The cell is over: a loop that has not said so was left without `close`."""
        self.hears_stop = False
        if not self.is_over:
            self._status = "stopped" if self.event.status == "stopping" else "ended"

    @property
    def status(self) -> str:
        """The status of the last event, or "ended" where the end of the cell was the end."""
        return self._status or self.event.status

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return bool(self._status) or self.event.status in OVER

    @property
    def can_stop(self) -> bool:
        """Whether a press of Stop ends it."""
        return self.hears_stop and self.event.heeds_stop and not self.is_over

    @property
    def progress(self) -> float | None:
        """The share done; None where nobody knows how much there is."""
        num_steps = self.event.num_steps
        return min(1.0, self.step / num_steps) if num_steps else None

    def line(self) -> str:
        """Where it is, in one line of text."""
        line = monitor_line(self.event, self.step, self.latest)
        return line if self.status == self.event.status else f"{line}, {self.status}"

    def plots(self) -> tuple[View, Lines]:
        """Looks and axes of all plots, which are named "0", "1", ... in their order; all lines."""
        groups = self.event.groups
        looks = [own_plot(str(n), *group) for n, group in enumerate(groups.items())]
        lines: Lines = {}
        latest = {}
        for n, (title, names) in enumerate(groups.items()):
            curves = [self._curves.get(name, {}).copy() for name in names]
            lines[str(n)] = {
                str(k): thinned([*curve], [*curve.values()])[0] for k, curve in enumerate(curves)
            }
            values = [f"{name} {self.latest[name]:.4g}" for name in names if name in self.latest]
            latest[str(n)] = f"{title}: {', '.join(values)}"
        first, plan = self.first or 0, self.event.num_steps
        # A loop that continues from a checkpoint would be drawn at the right edge alone.
        start = first if 0 < self.step < 4 * first and self.step > first else 0
        end = start + fitted_end(self.step - start, plan - start, is_over=self.is_over)
        axes = {"steps": {"low": start, "high": end, "per_epoch": 0}, "best": {}}
        return {"plots": looks, "legend": legend(looks), "axes": axes, "latest": latest}, lines


History = TrainingHistory | LoopHistory


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


def board_of(history: History, status: str = "") -> Board:
    """The state of a history.

    Args:
        status: in the place of the history's own: a press that it has not noticed yet.
    """
    status = status or history.status
    if isinstance(history, LoopHistory):
        return _board_of_loop(history, status)
    headline, remaining = words.headline(history, status), words.remaining(history)
    view, lines = training_plots(history)
    clock = {"started_at": history.start.started_at if history.start else 0.0}
    return Board(
        parts={
            "header": header(headline, history.progress, remaining, is_failed=status == "failed"),
            "notices": notices([words.notice(history), words.bottleneck(history)]),
            "tables": tables(words.table(history)),
            "ranks": ranks(history),
        },
        text=training_text(history),
        lost=f"Failed: {words.lost(history)}",
        stop="" if history.is_over else words.stop_label(history),
        hint="" if history.is_over else words.HINT,
        plots={"view": {**view, "clock": clock}, "lines": lines},
    )


def training_text(history: TrainingHistory) -> str:
    """The outcome in a few lines."""
    said = [*words.notice(history).splitlines(), *filter(None, [words.bottleneck(history)])]
    lines = [words.headline(history), *(f"  {line}" for line in said)]
    if history.start is None or not history.steps:
        return "\n".join(lines)
    for section, rows in words.table(history):
        shown = [f"{label.lower()} {value}" for label, value in rows if value != NONE]
        if shown:
            lines.append(f"  {section + ':':<16}{', '.join(shown)}")
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
            "header": header(headline, history.progress, done, is_failed=is_failed),
            "tables": tables([section for section in sections if section[1]]),
        },
        text=history.line(),
        lost=f"{event.title}: the kernel stopped at step {step}, and the loop with it",
        stop="Stop" if history.can_stop else "",
        hint=words.HINT if history.can_stop else "",
        plots={"view": {**view, "clock": {"started_at": history.started_at}}, "lines": lines},
    )


# ---- the parts ---------------------------------------------------------------------------------


def header(headline: str, progress: float | None, remaining: str, *, is_failed: bool) -> str:
    """What happens, and how far that is; None: nobody knows how much there is."""
    failed = " gpm-failed" if is_failed else ""
    bar = f'<progress max="1" value="{progress or 0:.3g}" aria-label="Share of the training done">'
    return (
        f'<b class="gpm-status{failed}" role="status">{escape(headline)}</b>'
        f"{'' if progress is None else f'{bar}</progress>'}"
        f'<span class="gpm-remaining">{escape(remaining)}</span>'
    )


def notices(texts: Sequence[str]) -> str:
    """What should be known at once, a block each."""
    style = "white-space:pre-wrap"  # also where style sheets are taken out
    return "".join(
        f'<div class="gpm-notice" style="{style}">{escape(text)}</div>' for text in texts if text
    )


def tables(sections: words.Table) -> str:
    """The tables beside the plots."""
    return "".join(_table(escape(title), rows) for title, rows in sections)


def _table(title: str, rows: words.Rows) -> str:
    body = "".join(
        f'<tr><th scope="row"{_whole(label)}>{escape(label)}</th><td>{escape(value)}</td></tr>'
        for label, value in rows
    )
    return (
        f'<details open=""><summary>{title}</summary>'
        f'<table aria-label="{title}"><tbody>{body}</tbody></table></details>'
    )


def _whole(label: str) -> str:
    """A long name, such as that of a metric, is cut; the pointer shows the whole of it."""
    return f' title="{escape(label)}"' if len(label) > 24 else ""


def ranks(history: TrainingHistory) -> str:
    """How each rank fared last. Many ranks scroll."""
    if not history.ranks:
        return ""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in words.RANK_COLUMNS)
    rows = ""
    for rank, shown in words.rank_rows(history).items():
        row = "".join(f"<td>{_share(share, text)}</td>" for text, share in shown)
        rows += f'<tr><th scope="row">{escape(rank)}</th>{row}</tr>'
    # Each region of a page has a name of its own.
    began = clock_time(history.start.started_at) if history.start else ""
    name = f"How each rank fared: training of {began}, step {len(history.steps)}"
    return (
        '<details class="gpm-ranks" open=""><summary>'
        f'<b class="gpm-rank-title">{words.rank_title(history)}</b> '
        f'<span class="gpm-rank-summary">{words.rank_summary(history)}</span></summary>'
        f'<div class="gpm-scroll" role="region" aria-label="{escape(name)}" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        f"{shares_html(Shares.of(history))}</details>"
    )


def _share(share: float | None, text: str) -> str:
    """A bar beside its words; the words alone where nobody knows the share."""
    if share is None:
        return escape(text)
    return f'<div><i><i style="width:{100 * share:.0f}%"></i></i>{escape(text)}</div>'
