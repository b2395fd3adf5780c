"""The plan of a training as HTML, with the curve of the learning rate. Runs on the client."""

from __future__ import annotations

from html import escape

from gpupool.core.options import plan as plans
from gpupool.core.options.plan import TrainingPlan
from gpupool.notebook.drawing import svg
from gpupool.notebook.page import markup

# A mid-tone: the background is not known, and may be white or nearly black.
COLOR = "#1a85d6"
WIDTH, HEIGHT = 420, 152
AREA = svg.Area(left=58, right=400, top=18, bottom=118)
_BLOCK = "break-inside:avoid;max-width:520px;overflow:hidden"


def plan_html(plan: TrainingPlan) -> str:
    """The sections side by side, the curve among them, and a table of the ranks."""
    blocks = []
    for title, rows in plans.sections(plan):
        curve = "" if title != "Learning rate" or plan.is_constant else curve_svg(plan)
        blocks.append(_block(title, _facts(rows) + curve))
    ranks = markup.table(("rank", "device", "does"), plans.rank_rows(plan))
    blocks.append(_block("Ranks", ranks))
    head = f'<div style="font-weight:600">{escape(plans.headline(plan))}</div>'
    notes = "".join(markup.bar(escape(note), markup.AMBER) for note in plan.notes)
    inner = "".join(blocks)
    flow = f'<div style="columns:320px;column-gap:28px">{inner}</div>'
    return markup.card(head, notes, flow)


def curve_svg(plan: TrainingPlan) -> str:
    """The learning rate over the steps, from 0 up; the warm-up on a shaded ground."""
    points = list(plan.learning_rates)
    last, top = points[-1][0], max(rate for _, rate in points)
    # At least 2: an axis of a single step has no length to divide by.
    x = svg.scale({"low": 1, "high": max(2, last)}, AREA.left, AREA.right)
    y = svg.scale({"low": 0.0, "high": top}, AREA.bottom, AREA.top)
    steps = {"ticks": [(1, "1"), (last, f"{last:,}")]}
    rates = {"ticks": [(rate, f"{rate:.3g}") for rate in (0.0, top / 2, top)]}
    warmup = [(1, plan.warmup_steps + 1, "warm-up")] if plan.warmup_steps else []
    line = svg.polyline(points, x, y, f'stroke="{COLOR}" stroke-width="2"')
    inner = svg.bands(AREA, warmup, x) + svg.ticks(AREA, steps, rates, x, y) + line
    label = (
        f"Learning rate: {points[0][1]:.3g} in the first step, at most {top:.3g}, "
        f"{points[-1][1]:.3g} in step {last:,}"
    )
    drawing = svg.drawing(inner, WIDTH, HEIGHT, label)
    return f'<div style="max-width:{WIDTH}px">{drawing}</div>'


def _block(title: str, inner: str) -> str:
    head = f'<div style="font-weight:600;opacity:.75;margin-top:4px">{escape(title)}</div>'
    return f'<div style="{_BLOCK}">{head}{inner}</div>'


def _facts(rows: plans.Rows) -> str:
    name = 'style="text-align:left;font-weight:400;opacity:.7;padding:1px 12px 1px 0;'
    name += 'vertical-align:top;white-space:nowrap"'
    value = 'style="text-align:left;padding:1px 0"'
    body = "".join(
        f'<tr><th scope="row" {name}>{escape(what)}</th><td {value}>{escape(fact)}</td></tr>'
        for what, fact in rows
    )
    return f'<table style="{markup.FONT}"><tbody>{body}</tbody></table>'
