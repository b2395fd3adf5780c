"""What a rank has to know so that its tracebacks name the notebook's cells. Runs on the client."""

from __future__ import annotations

import linecache
from collections.abc import Iterable
from typing import Any


def sources_of(filenames: Iterable[str], shell: Any) -> dict[str, tuple[int, str]]:
    """File name -> (number of the cell, its text), for the names that IPython gave to cells.

    Args:
        filenames: `co_filename` of the code that travels; files on disk are left out.
        shell: the notebook's IPython, or None outside of one.
    """
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    found = {}
    for name in set(filenames) & set(numbers):
        found[name] = (numbers[name], "".join(linecache.getlines(name)))
    return found


def in_its_place(body: str, shell: Any) -> str:
    """The body of a cell magic with an empty line for each line above it in the notebook's cell.

    So lines have the numbers that the notebook shows beside them.
    """
    cell = _running_cell(shell).rstrip("\n")
    tail = body.rstrip("\n")
    if not tail or not cell.endswith(tail):  # run by a program, which keeps no history
        return "\n" + body
    return "\n" * cell[: len(cell) - len(tail)].count("\n") + body


def on_its_line(expression: str, shell: Any) -> str:
    """The expression of `%spmd`, likewise."""
    for number, line in enumerate(_running_cell(shell).splitlines()):
        if "%spmd" in line and line.rstrip().endswith(expression.strip()):
            return "\n" * number + expression
    return expression


def _running_cell(shell: Any) -> str:
    history = getattr(shell.history_manager, "input_hist_raw", None) or [""]
    return str(history[-1])
