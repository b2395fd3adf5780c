"""What a training leaves behind, as HTML: facts and values. Runs on the client."""

from __future__ import annotations

from html import escape

from gpupool.core.wire.events import ValidationEvent
from gpupool.notebook.page import markup
from gpupool.training.result import TrainingResult, in_words, measured_by

_CELL = "border:0;background:none;padding:1px 14px 1px 0;text-align:left;vertical-align:top"
_TABLE = "border:0;border-collapse:collapse;margin:0;color:inherit;font-size:inherit"


def result_html(result: TrainingResult) -> str:
    """The facts and values, and the warnings above them."""
    colour = markup.GREEN if result.history.status == "finished" else markup.AMBER
    state, _, rest = result.headline.partition(", ")
    badge = markup.badge(state, colour)
    head = f"<div><b>Training result</b>{badge}{markup.muted(rest)}</div>"
    warnings = "".join(markup.bar(escape(text), markup.AMBER) for text in result.warnings)
    rows = "".join(
        f'<tr style="background:none"><th scope="row" style="{_CELL};font-weight:400;opacity:.8;'
        f'white-space:nowrap">{escape(label)}</th>'
        f'<td style="{_CELL};overflow-wrap:anywhere">{escape(value)}</td></tr>'
        for label, value in result.rows()
    )
    return markup.card(head, warnings, f'<table style="{_TABLE}"><tbody>{rows}</tbody></table>')


def validation_html(event: ValidationEvent) -> str:
    """What one validation has found."""
    when = f"after step {event.step:,}, epoch {event.epoch}"
    best = markup.badge("best so far", markup.GREEN) if event.is_best else ""
    head = f"<div><b>Validation</b> {markup.muted(when)}{best}</div>"
    names, values = zip(*measured_by(event), strict=True)
    return markup.card(head, markup.table(names, [values]))


def validation_text(event: ValidationEvent) -> str:
    """The same as a line."""
    values = in_words(measured_by(event))
    return f"Validation after step {event.step:,} (epoch {event.epoch}): {values}"
