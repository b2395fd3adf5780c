"""What the running cell has shown of a result or an error: it is not shown again. Client."""

from __future__ import annotations

from typing import Any, Literal

from IPython.core.getipython import get_ipython

from gpupool.core.errors import SpmdError
from gpupool.pool.result import SpmdResult

Part = Literal["nothing", "texts", "everything"]


def mark_shown(result: SpmdResult | None, part: Part = "everything") -> None:
    """The running cell has shown this result, or of it what the ranks have printed."""
    if result is not None:
        result.shown = (_this_cell(), part)


def part_shown(result: SpmdResult) -> Part:
    """What the cell that runs has shown of this result."""
    cell, part = result.shown
    return part if cell == _this_cell() else "nothing"


def mark_error_shown(error: SpmdError) -> None:
    """The running cell has shown the tracebacks of this error: raised in it, it need not again."""
    shell: Any = get_ipython()

    # After the cell: asked for again in another one, the error shows its tracebacks once more.
    def forget(_: object) -> None:
        error.is_shown = False
        shell.events.unregister("post_run_cell", forget)

    error.is_shown = True
    shell.events.register("post_run_cell", forget)


def _this_cell() -> int:
    shell: Any = get_ipython()
    return int(shell.displayhook.prompt_count) if shell is not None else 0
