"""A confusion matrix as a table of coloured cells. Runs on the client."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from gpupool.core.formatting import percent
from gpupool.notebook.page import markup

if TYPE_CHECKING:
    from gpupool.training.confusion import ConfusionMatrix

_MAX_SHOWN = 40  # classes
_RIGHT, _WRONG = "0,114,189", "217,83,25"  # as MATLAB's confusionchart has them
_CELL = "padding:3px 7px;text-align:right;border:1px solid rgba(128,128,128,.25)"
_NAME = "padding:3px 7px;font-weight:600;white-space:nowrap;max-width:160px;overflow:hidden"
_TURNED = "writing-mode:vertical-rl;transform:rotate(180deg);max-height:160px"


def confusion_html(matrix: ConfusionMatrix) -> str:
    """Rows are true classes, columns predicted ones; the share found of each beside it.

    Of very many classes, the pairs that were confused most often.
    """
    head = f"<div><b>Confusion matrix</b> {markup.muted(matrix.summary())}</div>"
    if len(matrix.classes) > _MAX_SHOWN:
        rows = [(true, said, f"{number:,}") for true, said, number in matrix.most_confused(20)]
        return markup.card(head, markup.table(("true class", "taken for", "times"), rows))
    # `tabindex`: without it the table could be scrolled with a mouse alone.
    return markup.card(head, f'<div tabindex="0" style="overflow:auto">{_table(matrix)}</div>')


def _table(matrix: ConfusionMatrix) -> str:
    names = [escape(name) for name in matrix.classes]
    turned = _TURNED if max(map(len, matrix.classes)) > 6 or len(names) > 12 else ""
    head = "".join(
        f'<th scope="col" style="{_NAME};vertical-align:bottom" title="{name}">'
        f'<span style="{turned}">{name}</span></th>'
        for name in names
    )
    columns = f'<tr><th style="{_NAME}">true \\ predicted</th>{head}{_head_of_shares("found")}</tr>'
    shares = matrix.normalized("true")
    body = "".join(
        _row(name, matrix, number, shares[number].tolist()) for number, name in enumerate(names)
    )
    last = "".join(_share_cell(value) for value in matrix.precision.tolist())
    foot = f'<tr><th scope="row" style="{_NAME};text-align:right">right</th>{last}<td></td></tr>'
    style = f"{markup.FONT};border-collapse:collapse;margin:6px 0"
    return f'<table style="{style}"><thead>{columns}</thead><tbody>{body}{foot}</tbody></table>'


def _row(name: str, matrix: ConfusionMatrix, number: int, shares: Sequence[float]) -> str:
    cells = "".join(
        _cell(int(matrix.counts[number, column]), share, is_right=column == number)
        for column, share in enumerate(shares)
    )
    found = _share_cell(float(matrix.recall[number]))
    head = f'<th scope="row" style="{_NAME};text-align:right" title="{name}">{name}</th>'
    return f"<tr>{head}{cells}{found}</tr>"


def _cell(count: int, share: float, *, is_right: bool) -> str:
    """A count; the more of its row it is, the stronger its colour."""
    colour = ""
    if count:
        # Never quite opaque: the text keeps the colour of the page, light or dark.
        strength = 0.12 + 0.5 * share
        colour = f";background:rgba({_RIGHT if is_right else _WRONG},{strength:.2f})"
    weight = ";font-weight:600" if is_right else ""
    return f'<td style="{_CELL}{colour}{weight}">{f"{count:,}" if count else ""}</td>'


def _share_cell(share: float) -> str:
    shown = percent(None if math.isnan(share) else share)
    return f'<td style="{_CELL};border-color:transparent;opacity:.75">{shown}</td>'


def _head_of_shares(text: str) -> str:
    return f'<th scope="col" style="{_NAME};vertical-align:bottom;opacity:.75">{text}</th>'
