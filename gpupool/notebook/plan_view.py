"""The plan of a training as HTML, with the curve of the learning rate. Runs on the client."""

from __future__ import annotations

from html import escape

from gpupool.core import plan_words
from gpupool.core.plan import TrainingPlan
from gpupool.notebook import markup

# A mid-tone: the background is not known, and may be white or nearly black.
COLOR = "#1a85d6"
WIDTH, HEIGHT = 420, 150
LEFT, RIGHT, TOP, BOTTOM = 58, 408, 12, 118
_BLOCK = "break-inside:avoid;max-width:520px;overflow:hidden"


def plan_html(plan: TrainingPlan) -> str:
    """The sections side by side, the curve among them, and a table of the ranks."""
    blocks = []
    for title, rows in plan_words.sections(plan):
        curve = "" if title != "Learning rate" or plan.is_constant else curve_svg(plan)
        blocks.append(_block(title, _facts(rows) + curve))
    ranks = markup.table(("rank", "device", "does"), plan_words.rank_rows(plan))
    blocks.append(_block("Ranks", ranks))
    head = f'<div style="font-weight:600">{escape(plan_words.headline(plan))}</div>'
    notes = "".join(markup.bar(escape(note), markup.AMBER) for note in plan.notes)
    inner = "".join(blocks)
    flow = f'<div style="columns:320px;column-gap:28px">{inner}</div>'
    return markup.card(head, notes, flow)


def curve_svg(plan: TrainingPlan) -> str:
    """The learning rate over the steps, from 0 up; the warm-up on a shaded ground."""
    points = plan.learning_rates
    last, top = points[-1][0], max(rate for _, rate in points)

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * (step - 1) / max(1, last - 1)

    def y(rate: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * rate / top

    parts = []
    if plan.warmup_steps:
        width = x(plan.warmup_steps + 1) - LEFT
        parts.append(
            f'<rect x="{LEFT}" y="{TOP}" width="{width:.1f}" height="{BOTTOM - TOP}" '
            'fill-opacity=".08"><title>warm-up</title></rect>'
        )
    for rate in (0.0, top / 2, top):
        parts.append(
            f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y(rate):.1f}" y2="{y(rate):.1f}" '
            'stroke="currentColor" stroke-opacity=".18"/>'
            f'<text x="{LEFT - 6}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:.3g}</text>'
        )
    line = " ".join(f"{x(step):.1f},{y(rate):.1f}" for step, rate in points)
    parts.append(f'<polyline fill="none" stroke="{COLOR}" stroke-width="2" points="{line}"/>')
    for step, anchor in ((1, "start"), (last, "end")):
        parts.append(
            f'<text x="{x(step):.1f}" y="{BOTTOM + 15}" text-anchor="{anchor}">{step:,}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + RIGHT) // 2}" y="{BOTTOM + 15}" text-anchor="middle" '
        'fill-opacity=".65">step</text>'
    )
    label = (
        f"Learning rate: {points[0][1]:.3g} in the first step, at most {top:.3g}, "
        f"{points[-1][1]:.3g} in step {last:,}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT - 12}" role="img" '
        f'aria-label="{escape(label)}" font-size="11" fill="currentColor" '
        f'style="display:block;width:100%;max-width:{WIDTH}px;height:auto">{"".join(parts)}</svg>'
    )


def _block(title: str, inner: str) -> str:
    head = f'<div style="font-weight:600;opacity:.75;margin-top:4px">{escape(title)}</div>'
    return f'<div style="{_BLOCK}">{head}{inner}</div>'


def _facts(rows: plan_words.Rows) -> str:
    name = 'style="text-align:left;font-weight:400;opacity:.7;padding:1px 12px 1px 0;'
    name += 'vertical-align:top;white-space:nowrap"'
    value = 'style="text-align:left;padding:1px 0"'
    body = "".join(
        f'<tr><th scope="row" {name}>{escape(what)}</th><td {value}>{escape(fact)}</td></tr>'
        for what, fact in rows
    )
    return f'<table style="{markup.FONT}"><tbody>{body}</tbody></table>'
