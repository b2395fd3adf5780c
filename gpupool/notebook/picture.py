"""The picture of a training that stays: HTML with SVG for the notebook, text for a terminal.

Pure functions; they run on the client. The HTML needs no script, no kernel and no network, and
takes its text colour from the page, so that it is readable on light and on dark.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

from gpupool.notebook import markup, words
from gpupool.notebook.curves import PLOTS, Curves, Point
from gpupool.training.history import TrainingHistory

# Mid-tones: the background is not known, and may be white or nearly black.
COLORS = {"accuracy": "#1a85d6", "loss": "#e0632a"}
TITLES = {"accuracy": "Accuracy (%)", "loss": "Loss"}
WIDTH, HEIGHT = 640, 216
LEFT, RIGHT, TOP, BOTTOM = 46, 618, 18, 178
MAX_POINTS = 500

Scale = Callable[[float], float]


def training_html(history: TrainingHistory) -> str:
    """The plots, the table and the legend as one self-contained piece of HTML."""
    curves = Curves(MAX_POINTS)
    curves.take(history)
    whole, axes = curves.whole(), curves.axes(history)
    plots = [p for p in PLOTS if p == "loss" or any(whole[p].values())]
    latest = words.latest(history)
    drawn = "".join(_plot(p, whole[p], axes, latest[p]) for p in plots)
    return (
        '<div class="gpupool-training" style="border:1px solid rgba(128,128,128,.45);'
        "border-radius:6px;padding:10px 14px;max-width:1080px;font-size:13px;"
        'font-family:var(--jp-ui-font-family,system-ui,sans-serif);line-height:1.5">'
        f"{_header(history)}{_notice(history)}"
        '<div style="display:flex;flex-wrap:wrap;gap:8px 24px">'
        f'<div style="flex:3 1 420px;min-width:0;max-width:760px">{drawn}'
        f"{_legend(plots, any(whole[p]['validation'] for p in plots))}</div>"
        f"{_table(words.table(history))}</div></div>"
    )


def training_text(history: TrainingHistory) -> str:
    """The outcome in a few lines."""
    lines = [words.headline(history), *([f"  {history.notice}"] if history.notice else [])]
    if history.start is None or not history.steps:
        return "\n".join(lines)
    for section, rows in words.table(history):
        shown = [f"{label.lower()} {value}" for label, value in rows if value != "–"]
        if shown:
            lines.append(f"  {section + ':':<16}{', '.join(shown)}")
    return "\n".join(lines)


def _header(history: TrainingHistory) -> str:
    share = int(100 * history.progress)
    bar = (
        '<span style="flex:1 1 120px;height:8px;border-radius:4px;overflow:hidden;'
        'background:rgba(128,128,128,.25)">'
        f'<span style="display:block;height:8px;width:{share}%;'
        f'background:{COLORS["accuracy"]}"></span></span>'
    )
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:4px 14px;align-items:center;'
        f'margin-bottom:6px"><b>{escape(words.headline(history))}</b>{bar}'
        f'<span style="opacity:.75">{escape(words.remaining(history))}</span></div>'
    )


def _notice(history: TrainingHistory) -> str:
    return markup.bar(markup.code(history.notice), markup.AMBER) if history.notice else ""


def _plot(plot: str, lines: dict[str, list[Point]], axes: dict[str, Any], latest: str) -> str:
    x_axis, y_axis, color = axes["steps"], axes[plot], COLORS[plot]
    x = _scale(x_axis, LEFT, RIGHT)
    y = _scale(y_axis, BOTTOM, TOP)
    parts = [
        _bands(axes["bands"], x),
        _ticks(x_axis, y_axis, x, y),
        _polyline(lines["raw"], x, y, f'stroke="{color}" stroke-opacity=".35"'),
        _polyline(lines["smooth"], x, y, f'stroke="{color}" stroke-width="2"'),
        _polyline(lines["validation"], x, y, 'stroke="currentColor" stroke-dasharray="5 4"'),
        *(
            f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="{_marker(lines)}" '
            'fill="currentColor"/>'
            for step, value in lines["validation"]
        ),
    ]
    return (
        f'<div style="font-weight:600">{TITLES[plot]}</div>'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(latest)}" font-size="11" fill="currentColor" '
        f'style="display:block;width:100%;height:auto">{"".join(parts)}</svg>'
    )


def _scale(axis: dict[str, Any], start: float, end: float) -> Scale:
    low, high = axis["low"], axis["high"]
    return lambda value: start + (end - start) * (value - low) / (high - low)


def _marker(lines: dict[str, list[Point]]) -> float:
    """The radius of a validation marker: many of them must not become one thick line."""
    return 3 if len(lines["validation"]) <= 40 else 1.5


def _bands(bands: list[tuple[int, int, str]], x: Scale) -> str:
    """Every second band shaded; the labels stand above the plot, where no curve goes."""
    out = []
    for index, (first, last, label) in enumerate(bands):
        left, width = x(first), x(last) - x(first)
        if index % 2 == 0:
            out.append(
                f'<rect x="{left:.1f}" y="{TOP}" width="{width:.1f}" height="{BOTTOM - TOP}" '
                'fill-opacity=".07"/>'
            )
        out.append(
            f'<text x="{left + width / 2:.1f}" y="{TOP - 5}" text-anchor="middle" '
            f'fill-opacity=".65">{label}</text>'
        )
    return "".join(out)


def _ticks(x_axis: dict[str, Any], y_axis: dict[str, Any], x: Scale, y: Scale) -> str:
    grid = f'x1="{LEFT}" x2="{RIGHT}" stroke="currentColor" stroke-opacity=".18"'
    out = [
        f'<line {grid} y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{label}</text>'
        for tick, label in y_axis["ticks"]
    ]
    out += [
        f'<text x="{x(tick):.1f}" y="{BOTTOM + 15}" text-anchor="middle">{label}</text>'
        for tick, label in x_axis["ticks"]
    ]
    middle = (LEFT + RIGHT) // 2
    out.append(
        f'<text x="{middle}" y="{BOTTOM + 31}" text-anchor="middle" fill-opacity=".65">Step</text>'
    )
    return "".join(out)


def _polyline(points: list[Point], x: Scale, y: Scale, style: str) -> str:
    path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
    return f'<polyline fill="none" {style} points="{path}"/>'


def _legend(plots: list[str], validated: bool) -> str:
    def sample(style: str) -> str:
        ends = [(COLORS[p], i * 24 / len(plots)) for i, p in enumerate(plots)]
        return "".join(
            f'<line x1="{left:g}" x2="{left + 24 / len(plots):g}" y1="5" y2="5" '
            f'stroke="{color}" {style}/>'
            for color, left in ends
        )

    entries = [
        ("training (smoothed)", sample('stroke-width="2.5"')),
        ("training", sample('stroke-opacity=".4"')),
    ]
    if validated:
        dashes = '<line x1="0" x2="24" y1="5" y2="5" stroke="currentColor" stroke-dasharray="5 4"/>'
        entries.append(("validation", dashes + '<circle cx="12" cy="5" r="3"/>'))
    shown = "".join(
        '<span style="white-space:nowrap"><svg xmlns="http://www.w3.org/2000/svg" width="24" '
        f'height="10" fill="currentColor" aria-hidden="true">{drawing}</svg> {label}</span>'
        for label, drawing in entries
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:2px 18px">{shown}</div>'


def _table(table: words.Table) -> str:
    """One small table per section: beside the plots in a column, below them side by side."""
    cell = "border:0;padding:1px 4px;background:none;line-height:1.35"
    out = []
    for section, rows in table:
        body = "".join(
            f'<tr style="background:none"><th scope="row" style="{cell};text-align:left;'
            f'font-weight:400;opacity:.75">{escape(label)}</th>'
            f'<td style="{cell};text-align:right;white-space:nowrap;'
            f'font-variant-numeric:tabular-nums">{escape(value)}</td></tr>'
            for label, value in rows
        )
        out.append(
            '<table style="width:100%;border:0;border-collapse:collapse;margin:0;'
            'font-size:inherit;table-layout:auto;align-self:start">'
            '<caption style="text-align:left;font-weight:600;padding:4px 4px 0;color:inherit;'
            f'border-bottom:1px solid rgba(128,128,128,.3)">{escape(section)}</caption>'
            f"<tbody>{body}</tbody></table>"
        )
    return (
        '<div style="flex:1 1 220px;display:grid;gap:8px 20px;align-content:start;'
        f'grid-template-columns:repeat(auto-fit,minmax(210px,1fr))">{"".join(out)}</div>'
    )
