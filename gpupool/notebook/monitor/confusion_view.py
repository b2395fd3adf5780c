"""A confusion matrix as a table of coloured cells. Runs on the client."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from gpupool.core.formatting import percent, short_name
from gpupool.notebook.page import markup

if TYPE_CHECKING:
    from gpupool.training.confusion import ConfusionMatrix

_MAX_SHOWN = 40  # classes
_NAME_CHARS = 22
_RIGHT, _WRONG = "0,114,189", "217,83,25"  # as MATLAB's confusionchart has them
# In a style sheet, as there may be 1,600 cells; where it is taken out, the numbers remain.
_STYLE = """
#UID table{FONT;border-collapse:collapse;margin:6px 0}
#UID tr:nth-child(n){background:none}
#UID :is(td,th){padding:3px 7px;text-align:right;white-space:nowrap;color:inherit;background:none;
border:1px solid rgba(128,128,128,.25);font-variant-numeric:tabular-nums}
#UID th{font-weight:600;border:0}
#UID thead th{vertical-align:bottom}
#UID .gp-turned span{display:inline-block;writing-mode:vertical-rl;transform:rotate(180deg)}
#UID :is(td,th).gp-share{border:0;padding:3px 4px;opacity:.8;font-weight:400;font-size:90%}
#UID i{font-style:normal;font-weight:400;opacity:.7}
"""


def confusion_html(matrix: ConfusionMatrix) -> str:
    """Rows are true classes, columns predicted ones; recall beside each row, precision below each
    column.

    Of very many classes, the pairs that were confused most often, and a line for each class.
    """
    uid = f"gp{secrets.token_hex(4)}"
    head = f"<div><b>Confusion matrix</b> {markup.muted(matrix.summary())}</div>"
    if len(matrix.classes) > _MAX_SHOWN:
        rows = [(true, said, f"{number:,}") for true, said, number in matrix.most_confused(20)]
        pairs = markup.table(("true class", "taken for", "times"), rows)
        return markup.card(head, pairs, _classes(matrix))
    style = _STYLE.replace("UID", uid).replace("FONT", markup.FONT)
    # `tabindex`: without it the table could be scrolled with a mouse alone.
    scroller = markup.scroller(_table(matrix), "Confusion matrix")
    return markup.card(f'<div id="{uid}"><style>{style}</style>{head}{scroller}</div>')


def _table(matrix: ConfusionMatrix) -> str:
    order = range(len(matrix.classes))
    # With its index a class is found again in the columns, whose names are the same but turned.
    is_long = max(map(len, matrix.classes), default=0) > 6 or len(order) > 12
    turned = ' class="gp-turned"' if is_long else ""
    head = "".join(
        f'<th scope="col"{turned} title="{escape(matrix.classes[n])}">'
        f"<span>{_name(matrix, n, is_long)}</span></th>"
        for n in order
    )
    corner = '<th scope="col">true \\ predicted</th>'
    shares = matrix.shares.tolist()
    body = "".join(_row(matrix, n, order, shares[n], is_long) for n in order)
    precision = matrix.precision.tolist()
    last = "".join(_share(precision[n]) for n in order)
    return (
        f'<table><thead><tr>{corner}{head}<th scope="col" class="gp-share">recall</th></tr></thead>'
        f'<tbody>{body}</tbody><tfoot><tr><th scope="row" class="gp-share">precision</th>{last}'
        '<td class="gp-share"></td></tr></tfoot></table>'
    )


def _row(
    matrix: ConfusionMatrix, row: int, order: Sequence[int], shares: Sequence[float], is_long: bool
) -> str:
    cells = "".join(
        _cell(matrix, row, column, shares[column], is_right=column == row) for column in order
    )
    name = _name(matrix, row, is_long)
    head = f'<th scope="row" title="{escape(matrix.classes[row])}">{name}</th>'
    return f"<tr>{head}{cells}{_share(float(matrix.recall[row]))}</tr>"


def _cell(matrix: ConfusionMatrix, row: int, column: int, share: float, *, is_right: bool) -> str:
    """A number; the more of its row it is, the stronger its colour."""
    count = int(matrix.counts[row, column])
    if not count:
        return "<td></td>"
    # Never quite opaque: the text keeps the colour of the page, light or dark.
    colour = f"background:rgba({_RIGHT if is_right else _WRONG},{0.12 + 0.5 * share:.2f})"
    weight = ";font-weight:600" if is_right else ""
    true, said = (escape(matrix.classes[n]) for n in (row, column))
    words = f"{count:,} of {true}, {percent(share)}, taken for {said}"
    return f'<td title="{words}" style="{colour}{weight}">{count:,}</td>'


def _share(share: float) -> str:
    return f'<td class="gp-share">{_percent(share)}</td>'


def _percent(share: float) -> str:
    return percent(None if math.isnan(share) else share)


def _name(matrix: ConfusionMatrix, number: int, is_long: bool) -> str:
    name = escape(short_name(matrix.classes[number], _NAME_CHARS))
    return f"<i>{number}</i> {name}" if is_long else name


def _classes(matrix: ConfusionMatrix) -> str:
    """Every class of many with its recall and precision, in a block that is opened and scrolls."""
    sums = matrix.counts.sum(1).tolist()
    recall, precision = matrix.recall.tolist(), matrix.precision.tolist()
    rows = [
        (f"{n}", name, f"{sums[n]:,}", _percent(recall[n]), _percent(precision[n]))
        for n, name in enumerate(matrix.classes)
    ]
    table = markup.table(("", "class", "samples", "recall", "precision"), rows)
    inner = f'<div style="max-height:330px;overflow:auto" tabindex="0">{table}</div>'
    return markup.fold_out("Recall and precision of each class", inner, is_open=False)
