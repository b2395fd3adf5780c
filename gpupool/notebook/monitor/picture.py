"""The picture of a training or loop that stays: HTML for the notebook, text for a terminal.

Pure functions; they run on the client. The HTML needs no kernel and no network. Its plots are an
image; where scripts may run, one puts plots in its place that can be read off and zoomed, from the
state beside the image. Where scripts, styles and SVG are taken out (GitHub, a notebook that is not
trusted) the same image, the tables and all words remain.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from gpupool.core.formatting import NONE, clock_time
from gpupool.notebook.monitor import plots, words
from gpupool.notebook.monitor.curves import Lines
from gpupool.notebook.monitor.loop_history import LoopHistory, LoopState
from gpupool.notebook.monitor.widget_state import (
    MonitorState,
    TrainingState,
    View,
)
from gpupool.notebook.page import markup
from gpupool.training.history import TrainingHistory

History = TrainingHistory | LoopHistory

MAX_POINTS = 200  # of a curve in the image, which is some 600 pixels wide
MAX_STATE_POINTS = 400  # of one beside it, for those who zoom
# for the script
STATE = ("clock", "plots", "legend", "axes", "latest")


def history_html(history: History) -> str:
    """Plots, tables and the table of ranks as one self-contained piece of HTML.

    Its size is bounded, however long the training is. The plots of one that is over answer the
    pointer.
    """
    state = state_of(history)
    view, is_over = state.view, history.is_over
    failed = " gpm-failed" if history.status == "failed" else ""
    drawn = _plots(state, history) if state.has_points() or not is_over else ""
    end = plots_script("monitor.css") if is_over else _style("plots.css", "monitor.css")
    hint = markup.muted(view["hint"]) if view["hint"] else ""
    return (
        f'<div class="gpupool-training gpm-frame{failed}">{_header(view)}{_notices(view)}'
        f'<div class="gpm-body">{drawn}{_tables(view["table"])}</div>{_ranks(history)}'
        f"{hint}{end}</div>"
    )


def state_of(history: History, max_points: int = MAX_POINTS) -> MonitorState:
    """All that there is to draw of a history."""
    if isinstance(history, LoopHistory):
        state: MonitorState = LoopState(history)
    else:
        state = TrainingState(max_points)
    state.take(history, history.status)
    return state


def notice_of(history: History) -> str:
    """What should be known at once: hangs, restarts, warnings."""
    return "" if isinstance(history, LoopHistory) else words.notice(history)


def history_text(history: History) -> str:
    """How it went, as text."""
    return history.line() if isinstance(history, LoopHistory) else training_text(history)


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
    slow = [f"rank {row.rank} is the {row.note}" for row in words.rank_rows(history) if row.note]
    if slow:
        lines.append(f"  {words.rank_title(history) + ':':<16}{slow[0]}")
    return "\n".join(lines)


def _plots(state: MonitorState, history: History) -> str:
    image = plots.image(state.view, state.whole())
    if not history.is_over:
        return f'<div class="gpm-plots gpm-image">{image}</div>'
    finer = state_of(history, MAX_STATE_POINTS)
    return plots_html(image, finer.view, finer.whole())


def plots_html(image: str, view: View, lines: Lines) -> str:
    """Plots as an image, and the state of which `plots_script` makes those that answer.

    Args:
        view: with the entries `STATE`, as far as there are any.
    """
    known = {name: view[name] for name in STATE if name in view}
    packed = {
        plot: {name: _packed(points) for name, points in of_plot.items()}
        for plot, of_plot in lines.items()
    }
    data = markup.data_script({"view": known, "lines": packed}, "gpupool-state")
    return f'<div class="gpm-plots gpm-image">{image}{data}</div>'


def _packed(points: Sequence[tuple[float, ...]]) -> list[list[float]]:
    """Points as columns, the steps as distances: half as long as pairs."""
    if not points:
        return []
    steps, *columns = zip(*points, strict=True)
    distances = [now - before for before, now in pairwise((0, *steps))]
    return [distances, *([_short(value) for value in column] for column in columns)]


def _short(value: float) -> float:
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() else short


@functools.cache
def plots_script(*styles: str) -> str:
    """These style sheets, and what puts plots that answer in the place of a page's images."""
    # Within a function: nothing is seen from outside, and a page may have it several times.
    code = markup.compact_script(markup.static_text("plots.js", "stills.js"))
    # Only plots that the script makes need their style, and in it that takes half the room.
    style = json.dumps(markup.compact_style(markup.static_text("plots.css")))
    script = markup.packed_script(f"(() => {{\n{code}exploreStills({style});\n}})()")
    return f"{_style(*styles)}{script}"


def _style(*names: str) -> str:
    if not names:
        return ""
    return f"<style>{markup.compact_style(markup.static_text(*names))}</style>"


# From here on the elements are those of static/monitor.js, with the classes of its style sheet: the
# end of a training changes nothing but its state.


def _header(view: View) -> str:
    bar = ""
    if view["progress"] is not None:
        share = f'value="{view["progress"]:.3g}"'
        bar = f'<progress max="1" {share} aria-label="Share of the training done"></progress>'
    return (
        f'<div class="gpm-header"><b class="gpm-status">{escape(view["headline"])}</b> {bar}'
        f' <span class="gpm-remaining">{escape(view["remaining"])}</span></div>'
    )


def _notices(view: View) -> str:
    lines = filter(None, [view["notice"], view["bottleneck"]])
    return "".join(
        f'<div class="gpm-notice" style="white-space:pre-wrap">{escape(text)}</div>'
        for text in lines
    )


def _tables(table: words.Table) -> str:
    out = []
    for section, rows in table:
        body = "".join(
            f'<tr><th scope="row"{_whole(label)}>{escape(label)}</th><td>{escape(value)}</td></tr>'
            for label, value in rows
        )
        title = escape(section)
        out.append(
            f'<details open=""><summary>{title}</summary>'
            f'<table aria-label="{title}"><tbody>{body}</tbody></table></details>'
        )
    return f'<div class="gpm-tables">{"".join(out)}</div>'


def _whole(label: str) -> str:
    """A long name, such as that of a metric, is cut; the pointer shows the whole of it."""
    return f' title="{escape(label)}"' if len(label) > 24 else ""


def _ranks(history: History) -> str:
    """How each rank fared last. Many ranks scroll."""
    if isinstance(history, LoopHistory) or not history.ranks:
        return ""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in words.RANK_COLUMNS)
    rows = "".join(map(_rank_row, words.rank_rows(history)))
    # Each region of a page has a name of its own. Where scripts run, a number takes its place.
    began = clock_time(history.start.started_at) if history.start else NONE
    name = f"How each rank fared: training of {began}, step {len(history.steps)}"
    return (
        '<details class="gpm-ranks" open=""><summary>'
        f'<b class="gpm-rank-title">{words.rank_title(history)}</b> '
        f'<span class="gpm-rank-summary">{words.rank_summary(history)}</span></summary>'
        f'<div class="gpm-scroll" role="region" aria-label="{escape(name)}" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _rank_row(row: words.RankRow) -> str:
    note = f' <span class="gpm-badge">{escape(row.note)}</span>' if row.note else ""
    return (
        f'<tr><th scope="row">{escape(row.rank)}</th><td>{escape(row.device)}</td>'
        f"<td>{_share(row.utilization, row.utilization_text)}</td>"
        f"<td>{_share(row.memory, row.memory_text)}</td>"
        f"<td>{escape(row.temperature)}</td><td>{escape(row.step)}{note}</td></tr>"
    )


def _share(share: float | None, text: str) -> str:
    """A bar beside its words; the words alone where nobody knows the share."""
    if share is None:
        return escape(text)
    return f'<div><i><i style="width:{100 * share:.0f}%"></i></i>{escape(text)}</div>'
