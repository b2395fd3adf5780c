"""What a training leaves behind, as HTML: facts and values. Runs on the client."""

from __future__ import annotations

from html import escape

from gpupool.core.formatting import measured, percent
from gpupool.core.wire.events import ValidationEvent
from gpupool.notebook.page import markup
from gpupool.training.result import Summary, TrainingResult

_CELL = "border:0;background:none;padding:1px 14px 1px 0;text-align:left;vertical-align:top"
_NUMBER = "border:0;background:none;padding:1px 0 1px 18px;text-align:right"
_TABLE = "border:0;border-collapse:collapse;margin:0;color:inherit;font-size:inherit"


def result_html(result: TrainingResult) -> str:
    """The facts beside the values, and the warnings above them."""
    summary = result.summary()
    warnings = "".join(markup.bar(escape(text), markup.AMBER) for text in summary.warnings)
    columns = (
        '<div style="display:flex;flex-wrap:wrap;gap:10px 40px;align-items:flex-start">'
        f"{_facts(summary)}{_values(summary)}</div>"
    )
    return markup.card(_head(result, summary), warnings, columns)


def validation_html(event: ValidationEvent) -> str:
    """What one validation has found."""
    when = f"after step {event.step:,}, epoch {event.epoch}"
    best = markup.badge("best so far", markup.GREEN) if event.is_best else ""
    head = f"<div><b>Validation</b> {markup.muted(when)}{best}</div>"
    names, values = zip(*_measured(event), strict=True)
    table = markup.table(names, [values])
    return markup.card(head, table)


def validation_text(event: ValidationEvent) -> str:
    """The same as a line."""
    values = ", ".join(f"{name} {value}" for name, value in _measured(event))
    return f"Validation after step {event.step:,} (epoch {event.epoch}): {values}"


def _measured(event: ValidationEvent) -> list[tuple[str, str]]:
    found = {"accuracy": percent(event.accuracy)} if event.accuracy is not None else {}
    metrics = {name: measured(name, value) for name, value in event.metrics.items()}
    return [("loss", f"{event.loss:.4g}"), *(metrics | found).items()]


def _head(result: TrainingResult, summary: Summary) -> str:
    colour = markup.GREEN if result.history.status == "finished" else markup.AMBER
    state, _, rest = summary.headline.partition(", ")
    return (
        '<div style="margin-bottom:6px"><b>Training result</b>'
        f"{markup.badge(state, colour)}{markup.muted(rest)}</div>"
    )


def _facts(summary: Summary) -> str:
    rows = "".join(
        f'<tr style="background:none"><th scope="row" style="{_CELL};font-weight:400;opacity:.8;'
        f'white-space:nowrap">{escape(label)}</th>'
        f'<td style="{_CELL};overflow-wrap:anywhere">{escape(value)}</td></tr>'
        for label, value in summary.facts
    )
    return f'<table style="{_TABLE};flex:0 1 auto"><tbody>{rows}</tbody></table>'


def _values(summary: Summary) -> str:
    if not summary.values:
        return ""
    head = "".join(
        f'<th scope="col" style="{_NUMBER};font-weight:600">{escape(name)}</th>'
        for name in summary.columns[1:]
    )
    rows = "".join(
        f'<tr style="background:none"><th scope="row" style="{_CELL};font-weight:400;opacity:.8;'
        f'white-space:nowrap">{escape(name)}</th>'
        + "".join(
            f'<td style="{_NUMBER};font-variant-numeric:tabular-nums">{escape(cell)}</td>'
            for cell in cells
        )
        + "</tr>"
        for name, *cells in summary.values
    )
    return (
        f'<div style="overflow-x:auto;max-width:100%"><table style="{_TABLE}">'
        f'<thead><tr style="background:none"><td style="{_CELL}"></td>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
