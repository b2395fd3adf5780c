"""What a training leaves behind, as HTML: facts and values. Runs on the client."""

from __future__ import annotations

import math
import secrets
from html import escape
from typing import TYPE_CHECKING

from gpupool.core.formatting import percent, short_name
from gpupool.core.wire.events import ValidationEvent
from gpupool.notebook.page import markup
from gpupool.training.result import TrainingResult, in_words, measured_by

if TYPE_CHECKING:
    from gpupool.training.inference import ConfusionMatrix

_MAX_SHOWN = 40  # classes
_RIGHT, _WRONG = "0,114,189", "217,83,25"  # as MATLAB's confusionchart has them
# In a style sheet, as there may be 1,600 cells; where it is taken out, the numbers remain.
_STYLE = """
#UID table{FONT;border-collapse:collapse;margin:6px 0}
#UID tr:nth-child(n){background:none}
#UID :is(td,th){padding:3px 7px;text-align:right;white-space:nowrap;color:inherit;background:none;
border:1px solid rgba(128,128,128,.25);font-variant-numeric:tabular-nums}
#UID th{font-weight:600;border:0}
#UID thead th{vertical-align:bottom}
#UID th span{display:inline-block;writing-mode:vertical-rl;transform:rotate(180deg)}
#UID :is(td,th).gp-share{border:0;padding:3px 4px;opacity:.8;font-weight:400;font-size:90%}
"""


def result_html(result: TrainingResult) -> str:
    """The facts and values, and the warnings above them."""
    colour = markup.GREEN if result.history.status == "finished" else markup.AMBER
    state, _, rest = result.headline.partition(", ")
    badge = markup.badge(state, colour)
    head = f"<div><b>Training result</b>{badge}{markup.muted(rest)}</div>"
    warnings = "".join(markup.bar(escape(text), markup.AMBER) for text in result.warnings)
    rows = [(markup.Html(markup.muted(label)), value) for label, value in result.rows()]
    return markup.card(head, warnings, markup.table((), rows, ";overflow-wrap:anywhere"))


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


def confusion_html(matrix: ConfusionMatrix) -> str:
    """Rows are true classes, columns predicted ones; recall beside each row, precision below each
    column.

    Of very many classes, the pairs that were confused most often.
    """
    head = f"<div><b>Confusion matrix</b> {markup.muted(matrix.summary())}</div>"
    if len(matrix.classes) > _MAX_SHOWN:
        rows = [(true, said, f"{number:,}") for true, said, number in matrix.most_confused(20)]
        rest = markup.muted("Each class: matrix.recall, matrix.precision")
        return markup.card(head, markup.table(("true class", "taken for", "times"), rows), rest)
    uid, names = f"gp{secrets.token_hex(4)}", [escape(short_name(c, 22)) for c in matrix.classes]
    # Long names stand upright above the columns.
    is_long = len(names) > 12 or any(len(name) > 6 for name in matrix.classes)
    above = [f"<span>{name}</span>" if is_long else name for name in names]
    columns = "".join(f'<th scope="col">{name}</th>' for name in above)
    shares, recall = matrix.shares.tolist(), matrix.recall.tolist()
    precision = "".join(map(_share, matrix.precision.tolist()))
    body = "".join(
        f'<tr><th scope="row">{name}</th>{_cells(matrix, n, shares[n])}{_share(recall[n])}</tr>'
        for n, name in enumerate(names)
    )
    table = (
        f'<table><thead><tr><th scope="col">true \\ predicted</th>{columns}'
        f'<th scope="col" class="gp-share">recall</th></tr></thead><tbody>{body}</tbody><tfoot><tr>'
        f'<th scope="row" class="gp-share">precision</th>{precision}'
        '<td class="gp-share"></td></tr></tfoot></table>'
    )
    style = _STYLE.replace("UID", uid).replace("FONT", markup.FONT)
    scroller = markup.scroller(table, "Confusion matrix")
    return markup.card(f'<div id="{uid}"><style>{style}</style>{head}{scroller}</div>')


def _cells(matrix: ConfusionMatrix, row: int, shares: list[float]) -> str:
    """A row of numbers; the more of its row a number is, the stronger its colour."""
    cells, true = "", escape(matrix.classes[row])
    for n, count in enumerate(matrix.counts[row].tolist()):
        words = f"{count:,} of {true}, {_percent(shares[n])}, taken for {escape(matrix.classes[n])}"
        # Never quite opaque: the text keeps the colour of the page, light or dark.
        colour = f"rgba({_RIGHT if n == row else _WRONG},{0.12 + 0.5 * shares[n]:.2f})"
        style = f"background:{colour}" + ";font-weight:600" * (n == row)
        cells += f'<td title="{words}" style="{style}">{count:,}</td>' if count else "<td></td>"
    return cells


def _share(share: float) -> str:
    return f'<td class="gp-share">{_percent(share)}</td>'


def _percent(share: float) -> str:
    return percent(None if math.isnan(share) else share)
