"""The picture of a training or loop that stays: HTML for the notebook, text for a terminal.

Pure functions; they run on the client. The HTML needs no kernel and no network. Its plots are an
image; where scripts may run, one puts plots in its place that can be read off and zoomed, from the
state beside the image. Where scripts, styles and SVG are taken out (GitHub, a notebook that is not
trusted) the same image, the tables and all words remain.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

from gpupool.core.formatting import NONE
from gpupool.notebook.drawing import svg
from gpupool.notebook.monitor import words
from gpupool.notebook.monitor.loop_history import LoopHistory, LoopState
from gpupool.notebook.monitor.plots import COLORS, Plots
from gpupool.notebook.monitor.rank_words import RankRow
from gpupool.notebook.monitor.widget_state import MonitorState, TrainingState, View
from gpupool.notebook.page import markup
from gpupool.training.history import TrainingHistory

if TYPE_CHECKING:
    from gpupool.training.result import TrainingPlot

History = TrainingHistory | LoopHistory

MAX_POINTS = 200  # of a curve in the image, which is some 600 pixels wide
MAX_STATE_POINTS = 400  # of one beside it, for those who zoom
STATE = ("headline", "file_name", "plots", "legend", "axes", "latest", "timeline")  # for the script
MEMORY = "#4f9a1b"
TRACK = "background:rgba(128,128,128,.25);border-radius:4px;overflow:hidden;height:8px"
# Where the style sheet is taken out, these remain.
CAPTION = "text-align:left;font-weight:600;color:inherit"
# In a style sheet, as there may be many ranks; where it is taken out, the words remain. The
# selectors are that long to outweigh those of JupyterLab for tables.
RANKS = ".gpupool-training .gpupool-ranks"
TABLES = ".gpupool-training .gpupool-tables table"
CELL = (
    "border:0;vertical-align:baseline;padding:1px 4px;background:none;line-height:1.35;"
    "text-align:left;max-width:none;font-variant-numeric:tabular-nums"
)
TABLES_STYLE = f"""
{TABLES}{{width:100%;border:0;border-collapse:collapse;margin:0;color:inherit;font-size:inherit;
table-layout:auto;align-self:start}}
{TABLES} caption{{padding:4px 4px 0;border-bottom:1px solid rgba(128,128,128,.3)}}
{TABLES} tr:nth-child(n){{background:none}}
{TABLES} :is(td,th){{{CELL}}}
{TABLES} th{{font-weight:400;white-space:nowrap;opacity:.8;max-width:180px;overflow:hidden;
text-overflow:ellipsis}}
{TABLES} td{{text-align:right}}
"""
RANKS_STYLE = f"""
{RANKS}{{margin-top:8px;padding-left:10px;border-left:3px solid rgba(128,128,128,.4)}}
{RANKS} summary{{cursor:pointer}}
{RANKS}>div{{max-height:330px;overflow:auto}}
{RANKS} table{{border:0;border-collapse:collapse;margin:0;color:inherit;font-size:inherit}}
{RANKS} table thead{{border:0}}
{RANKS} table tr:nth-child(n){{background:none}}
{RANKS} table :is(td,th){{{CELL};padding-right:9px;font-weight:400;white-space:nowrap}}
{RANKS} table :is(td,th):last-child{{padding-right:0;white-space:normal}}
{RANKS} i{{display:block;height:4px;border-radius:2px;background:rgba(128,128,128,.25)}}
{RANKS} i i{{background:{COLORS["accuracy"]}}}
{RANKS} .gpupool-memory i i{{background:{MEMORY}}}
"""


def history_html(history: History) -> str:
    """Plots, tables and the strip of ranks as one self-contained piece of HTML.

    Its size is bounded, however long the training is. The plots of one that is over answer the
    pointer, and can be saved as a file from there.
    """
    state = state_of(history)
    plots, view = Plots(state), state.view
    # While it runs the plots are inline SVG, which takes the colours of the page.
    drawn = plots.html(as_picture=history.is_over)
    if history.is_over:
        data = _data(state_of(history, MAX_STATE_POINTS))
        drawn, end = f"<div>{drawn}{data}</div>", f"{svg.DARK_STYLE}{plots_script()}"
    else:
        end = markup.muted(view["hint"]) if view["hint"] else ""
    return (
        '<div class="gpupool-training" style="border:1px solid rgba(128,128,128,.45);'
        "border-radius:6px;padding:10px 14px;max-width:1360px;font-size:13px;"
        'font-family:var(--jp-ui-font-family,system-ui,sans-serif);line-height:1.5">'
        f"{_header(view)}{_notice(view)}"
        '<div style="display:flex;flex-wrap:wrap;gap:8px 24px">'
        '<div style="flex:3 1 420px;min-width:0;max-width:820px">'
        f"{drawn}</div>"
        f"{_table(view['table'])}</div>{_ranks(history)}{end}</div>"
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


def plot_html(plot: TrainingPlot) -> str:
    """What `TrainingResult.plot` gives, in a notebook."""
    return history_html(plot.history)


def plot_text(plot: TrainingPlot) -> str:
    """The same on a terminal."""
    return training_text(plot.history)


def _data(state: MonitorState) -> str:
    """The state of the plots, which the script finds beside the image."""
    known = {name: state.view[name] for name in STATE if name in state.view}
    lines = {
        plot: {name: _packed(points) for name, points in of_plot.items()}
        for plot, of_plot in state.whole().items()
    }
    return markup.data_script({"view": known, "lines": lines}, "gpupool-state")


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
def plots_script() -> str:
    """What puts plots that answer in the place of the images of a page."""
    # Within a function: nothing is seen from outside, and a page may have it several times.
    code = markup.compact_script(markup.static_text("plots.js", "timeline.js", "explore.js"))
    style = markup.compact_style(markup.static_text("plots.css"))
    script = markup.packed_script(f"(() => {{\n{code}exploreStills();\n}})()")
    return f"<style>{style}</style>{script}"


def _header(view: View) -> str:
    bar = ""
    if view["progress"] is not None:
        bar = (
            f'<span style="flex:1 1 120px;{TRACK}"><span style="display:block;height:8px;'
            f'width:{int(100 * view["progress"])}%;background:{COLORS["accuracy"]}"></span></span>'
        )
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:4px 14px;align-items:center;'
        f'margin-bottom:6px"><b>{escape(view["headline"])}</b>{bar}'
        f'{markup.muted(view["remaining"])}<span class="gpupool-buttons"></span></div>'
    )


def _notice(view: View) -> str:
    lines = [*view["notice"].splitlines(), *filter(None, [view["bottleneck"]])]
    return "".join(markup.bar(markup.code(line), markup.AMBER) for line in lines)


def _table(table: words.Table) -> str:
    """One small table per section: beside the plots in a column, below them side by side."""
    out = []
    for section, rows in table:
        body = "".join(
            f'<tr><th scope="row"{_whole(label)}>{escape(label)}</th><td>{escape(value)}</td></tr>'
            for label, value in rows
        )
        caption = f'<caption style="{CAPTION}">{escape(section)}</caption>'
        out.append(f"<table>{caption}<tbody>{body}</tbody></table>")
    return (
        f'<style>{TABLES_STYLE}</style><div class="gpupool-tables" style="flex:1 1 250px;'
        "display:grid;gap:8px 24px;align-content:start;"
        f'grid-template-columns:repeat(auto-fit,minmax(min(250px,100%),1fr))">{"".join(out)}</div>'
    )


def _whole(label: str) -> str:
    """A long name, such as that of a metric, is cut; the pointer shows the whole of it."""
    return f' title="{escape(label)}"' if len(label) > 24 else ""


def _ranks(history: History) -> str:
    """The strip: how each rank fared last. Many ranks scroll."""
    if isinstance(history, LoopHistory) or not history.ranks:
        return ""
    rows = words.rank_rows(history)
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in words.RANK_COLUMNS)
    title = f"<b>{words.rank_title(history)}</b> {markup.muted(words.rank_summary(history))}"
    return (
        f'<style>{RANKS_STYLE}</style><details class="gpupool-ranks" open="">'
        f'<summary>{title}</summary><div role="region" aria-label="How each rank fared" '
        f'tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(map(_rank_row, rows))}</tbody></table></div></details>"
    )


def _rank_row(row: RankRow) -> str:
    note = markup.badge(row.note, markup.AMBER) if row.note else ""
    return (
        f'<tr><th scope="row">{escape(row.rank)}</th><td>{escape(row.device)}</td>'
        f"<td>{_share(row.utilization, row.utilization_text)}</td>"
        f'<td class="gpupool-memory">{_share(row.memory, row.memory_text)}</td>'
        f"<td>{escape(row.temperature)}</td><td>{escape(row.step)}{note}</td></tr>"
    )


def _share(share: float | None, text: str) -> str:
    """A bar under its words; the words alone where nobody knows the share."""
    if share is None:
        return escape(text)
    return f'{escape(text)}<i><i style="width:{100 * share:.0f}%"></i></i>'
