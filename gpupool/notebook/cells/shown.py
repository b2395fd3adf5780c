"""What the running cell has shown of a result or an error: it is not shown again. Client."""

from __future__ import annotations

import weakref
from typing import Any, Literal

from IPython.core.getipython import get_ipython

from gpupool.core.errors import SpmdError

Part = Literal["nothing", "texts", "everything"]

_cell = 0
# A weak reference: this note must not keep the values of all ranks alive.
_result: weakref.ref[Any] | None = None
_part: Part = "nothing"


def mark_shown(result: object, part: Part = "everything") -> None:
    """The running cell has shown this result, or of it what the ranks have printed."""
    global _cell, _result, _part
    if result is not None:
        _cell, _result, _part = _this_cell(), weakref.ref(result), part


def mark_error_shown(error: SpmdError) -> None:
    """The running cell has shown the tracebacks of this error: raised in it, it need not again."""
    shell: Any = get_ipython()

    # After the cell: asked for again in another one, the error shows its tracebacks once more.
    def forget(_: object) -> None:
        error.is_shown = False
        shell.events.unregister("post_run_cell", forget)

    error.is_shown = True
    shell.events.register("post_run_cell", forget)


def part_shown(result: object) -> Part:
    """What the cell that runs has shown of this result."""
    is_it = _result is not None and _result() is result and _cell == _this_cell()
    return _part if is_it else "nothing"


def _this_cell() -> int:
    shell: Any = get_ipython()
    return int(shell.displayhook.prompt_count) if shell is not None else 0
