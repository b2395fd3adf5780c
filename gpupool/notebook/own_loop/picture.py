"""The picture of a loop of the user's: HTML with SVG, and text. Pure; runs on the client."""

from __future__ import annotations

from html import escape

from gpupool.core.wire.monitor_event import monitor_line
from gpupool.notebook.monitor import svg, words
from gpupool.notebook.own_loop.history import LoopHistory
from gpupool.notebook.page import markup

WIDTH, HEIGHT, KEY_ROW = 480, 190, 18
AREA = svg.Area(46, WIDTH - svg.MARGIN, 10, 154)
# mid-tones, as in plots.py; told apart by their dashes too
LINES = [
    ("#1a85d6", ""),
    ("#e0632a", "7 3"),
    ("#2da44e", "2 3"),
    ("#a855c7", "9 3 2 3"),
    ("#b58900", "4 4"),
    ("#12939a", "1 4"),
]
STATUS = {
    "running": "",
    "stopping": "stopping",
    "finished": "finished",
    "stopped": "stopped",
    "failed": "ended by an error",
    "ended": "ended",
}
HINT = "To stop after the next report, press the stop button of the notebook."


def loop_html(history: LoopHistory, uid: str = "") -> str:
    """The plots and numbers as one self-contained piece of HTML.

    Args:
        uid: names it in the page, where `static/loop_stop.js` puts a Stop button in the place of
            the class gpl-stop-UID, and hides what gpl-hint-UID says; "": there is none.
    """
    event = history.event
    plots = "".join(_plot(history, title, names) for title, names in event.groups.items())
    facts = [*((name, f"{value:.5g}") for name, value in history.latest.items())]
    facts += event.info.items()
    ranks = "1 rank" if event.world_size == 1 else f"{event.world_size} ranks"
    facts += [("elapsed", words.duration(event.elapsed_s)), ("on", ranks)]
    grid = "display:grid;gap:8px 20px;grid-template-columns:repeat(auto-fit,minmax(300px,1fr))"
    hint_name, button = (f' class="gpl-hint-{uid}"', _button_place(uid)) if uid else ("", "")
    hint = f"<div{hint_name}>{markup.muted(HINT)}</div>"
    return markup.card(
        _header(history, button),
        f'<div style="{grid}">{plots}</div>',
        _facts(facts),
        hint if history.can_stop else "",
        svg.DARK_STYLE if history.is_over else "",
    )


def loop_text(history: LoopHistory) -> str:
    """The same in a line."""
    line = monitor_line(history.event, history.step, history.latest)
    return line if history.status == history.event.status else f"{line}, {STATUS[history.status]}"


def _facts(facts: list[tuple[str, str]]) -> str:
    shown = "".join(
        f'<span style="white-space:nowrap">{markup.muted(name)} {escape(value)}</span>'
        for name, value in facts
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:2px 18px;margin-top:6px">{shown}</div>'


def _button_place(uid: str) -> str:
    return f'<span class="gpl-stop-{uid}" style="margin-left:auto"></span>'


def _header(history: LoopHistory, end: str) -> str:
    event, status = history.event, STATUS[history.status]
    done = f"step {words.number(history.step)}"
    if event.num_steps:
        done += f" of {words.number(event.num_steps)}"
    title = f"<b>{escape(event.title)}</b> {escape(done)}"
    bar = ""
    if history.progress is not None:
        share = 100 * history.progress
        bar = (
            '<span style="flex:1 1 120px;height:8px;border-radius:4px;overflow:hidden;'
            'background:rgba(128,128,128,.25)"><span style="display:block;height:8px;'
            f'width:{share:.0f}%;background:{LINES[0][0]}"></span></span>'
        )
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:4px 14px;align-items:center;'
        f'margin-bottom:6px"><span>{title}</span>{markup.muted(status) if status else ""}{bar}'
        f"{end}</div>"
    )


def _plot(history: LoopHistory, title: str, names: list[str]) -> str:
    x_axis, y_axis = history.axes(names)
    x, y = svg.scale(x_axis, AREA.left, AREA.right), svg.scale(y_axis, AREA.bottom, AREA.top)
    parts, styles = [svg.ticks(AREA, x_axis, y_axis, x, y)], []
    for n, name in enumerate(names):
        color, dashes = LINES[n % len(LINES)]
        style = f'stroke="{color}" stroke-width="2"'
        style += f' stroke-dasharray="{dashes}"' if dashes else ""
        styles.append(style)
        points = history.points(name)
        parts.append(svg.polyline(points, x, y, style))
        if len(points) <= 40:  # a line of few points would hardly be seen, one of one not at all
            parts.append(f'<g color="{color}">{svg.markers(points, x, y)}</g>')
    shown = [f"{name} {history.latest[name]:.4g}" for name in names if name in history.latest]
    keys, num_rows = _keys(names, styles) if len(names) > 1 else ("", 0)
    draw = svg.picture if history.is_over else svg.drawing
    height = HEIGHT + KEY_ROW * num_rows
    drawn = draw("".join([*parts, keys]), WIDTH, height, f"{title}: {', '.join(shown)}")
    return f'<div><div style="font-weight:600">{escape(title)}</div>{drawn}</div>'


def _keys(names: list[str], styles: list[str]) -> tuple[str, int]:
    """What each line is, below the plot, and how many rows that takes."""
    out, left, row = [], float(AREA.left), 0
    for name, style in zip(names, styles, strict=True):
        width = 48 + svg.CHAR_WIDTH * len(name)
        if left + width > AREA.right and left > AREA.left:
            left, row = AREA.left, row + 1
        place = f"translate({left:.0f},{HEIGHT + 8 + KEY_ROW * row})"
        label = svg.text(30, 4, name, "start")
        out.append(f'<g transform="{place}"><line x2="24" {style}/>{label}</g>')
        left += width
    return "".join(out), row + 1
