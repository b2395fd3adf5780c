"""A training or loop as HTML: the parts of the live picture, and the one that stays. Pure; client.

The HTML needs no kernel and no network. Its plots are an image; where scripts may run, one puts
plots in its place that can be read off and zoomed, from the state beside the image. Where scripts,
styles and SVG are taken out (GitHub, a notebook that is not trusted) the image, the tables and all
words remain.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from gpupool.core.formatting import clock_time, duration, number
from gpupool.notebook.monitor import plots, words
from gpupool.notebook.monitor.curves import LoopHistory, TrainingCurves
from gpupool.notebook.monitor.result_view import shares_html
from gpupool.notebook.page import markup
from gpupool.training.doctor import Shares
from gpupool.training.history import TrainingHistory

_STATUS = {"failed": "ended by an error"}

History = TrainingHistory | LoopHistory
Part = Callable[[str, str, str], str]  # (name, HTML within, CSS classes) -> element


@dataclass(frozen=True, slots=True)
class Board:
    """All that there is to draw.

    `parts` are HTML by name; `lost` is the headline if the kernel dies now; `stop` the label of the
    button, "" without one. `plots` are "view": looks, axes and what they show in words; and
    "lines": points.
    """

    parts: dict[str, str]
    lost: str
    stop: str
    plots: dict[str, Any]


def board_of(history: History, status: str = "", curves: TrainingCurves | None = None) -> Board:
    """What there is to draw of a history.

    `status` is in the place of its own: a press that it has not noticed yet. `curves` are those of
    a training that is drawn again and again: they take in what is new of it.
    """
    status = status or history.status
    if isinstance(history, LoopHistory):
        return _board_of_loop(history, status)
    headline, remaining = words.headline(history, status), words.remaining(history)
    view, lines = (curves or TrainingCurves()).plots(history)
    clock = {"started_at": history.start.started_at if history.start else 0.0}
    where = f"at step {number(len(history.steps))}" if history.steps else "before the first step"
    return Board(
        parts={
            "header": header(headline, history.progress, remaining, is_failed=status == "failed"),
            "notices": _notices([words.notice(history), words.bottleneck(history)]),
            "tables": _tables(words.table(history)),
            "ranks": _ranks(history),
        },
        lost=f"Failed: The kernel stopped {where}, and the training with it.",
        stop="" if history.is_over else words.stop_label(history),
        plots={"view": {**view, "clock": clock}, "lines": lines},
    )


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
            "tables": _tables([section for section in sections if section[1]]),
        },
        lost=f"{event.title}: the kernel stopped at step {step}, and the loop with it",
        stop="Stop" if history.can_stop else "",
        plots={"view": {**view, "clock": {"started_at": history.started_at}}, "lines": lines},
    )


def text_of(history: History) -> str:
    return history.line() if isinstance(history, LoopHistory) else words.training_text(history)


def history_html(history: History) -> str:
    """The picture that stays; its size is bounded, however long the training is."""
    return still_html(board_of(history))


def still_html(board: Board) -> str:
    image = image_of(board)
    state = markup.data_script(board.plots, "gpupool-state") if image else ""
    end = _style("monitor.css") + plots_script()
    return _frame("gpupool-training", board, image + state, _element, end)


def live_html(board: Board, image: str, part: Part) -> str:
    return _frame("gpm gpl-frame", board, image, part, _style("plots.css", "monitor.css"))


def _frame(kind: str, board: Board, drawn: str, part: Part, end: str) -> str:
    of = board.parts.get
    # where no page puts buttons into it
    hint = markup.muted("To stop, press the stop button of the notebook.") if board.stop else ""
    return (
        f'<div class="{kind} gpm-frame"><div class="gpm-header">'
        f"{part('header', of('header', ''), 'gpm-head')}"
        f"{part('buttons', hint, 'gpm-buttons')}</div>"
        f"{part('notices', of('notices', ''), '')}"
        f'<div class="gpm-body">{part("plots", drawn, "gpm-plots gpm-image")}'
        f"{part('tables', of('tables', ''), 'gpm-tables')}</div>"
        f"{part('ranks', of('ranks', ''), '')}{end}</div>"
    )


def _element(_name: str, inner: str, looks: str) -> str:
    return f'<div class="{looks}">{inner}</div>' if inner else ""


def image_of(board: Board) -> str:
    """The plots as an image; "" without any point."""
    has_any = any(any(lines.values()) for lines in board.plots["lines"].values())
    return plots.image(**board.plots) if has_any else ""


@functools.cache
def plots_script() -> str:
    # Within a function: nothing is seen from outside, and a page may have it several times.
    code = markup.static_text("plots.js", "stills.js")
    # Only plots that the script makes need their style, and in it that takes half the room.
    style = json.dumps(markup.compact_style(markup.static_text("plots.css")))
    return markup.packed_script(f"(() => {{\n{code}exploreStills({style});\n}})()")


def _style(*names: str) -> str:
    return f"<style>{markup.compact_style(markup.static_text(*names))}</style>"


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


def _notices(texts: Sequence[str]) -> str:
    style = "white-space:pre-wrap"  # also where style sheets are taken out
    return "".join(
        f'<div class="gpm-notice" style="{style}">{escape(text)}</div>' for text in texts if text
    )


def _tables(sections: words.Table) -> str:
    return "".join(
        f'<details open=""><summary>{escape(title)}</summary>'
        f'<table aria-label="{escape(title)}"><tbody>{"".join(map(_row, rows))}</tbody></table>'
        "</details>"
        for title, rows in sections
    )


def _row(row: tuple[str, str]) -> str:
    label, value = map(escape, row)
    # A long name, such as that of a metric, is cut; the pointer shows the whole of it.
    whole = f' title="{label}"' if len(row[0]) > 24 else ""
    return f'<tr><th scope="row"{whole}>{label}</th><td>{value}</td></tr>'


def _ranks(history: TrainingHistory) -> str:
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
        '<details class="gpm-ranks" open=""><summary><b>Ranks</b> '
        f'<span class="gpm-rank-summary">{words.rank_summary(history)}</span></summary>'
        f'<div class="gpm-scroll" role="region" aria-label="{escape(name)}" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        f"{shares_html(Shares.of(history))}</details>"
    )


def _share(share: float | None, text: str) -> str:
    if share is None:
        return escape(text)
    return f'<div><i><i style="width:{100 * share:.0f}%"></i></i>{escape(text)}</div>'
