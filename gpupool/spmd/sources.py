"""Give code the line numbers that it has in the notebook's cell. Runs on the client."""

from __future__ import annotations

from typing import Any


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
