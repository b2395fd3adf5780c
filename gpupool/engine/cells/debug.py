"""The debugger on this rank's last error, one command at a time. Runs on engines.

The frames stay where they are: `sys.last_exc` holds them, as in every interactive Python, until
the next error. Between two commands nothing waits: the rank is free for anything else.
"""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any

from IPython.core.debugger import Pdb

from gpupool.core.wire.replies import DebugReply

_NOTHING = (
    "There is nothing to look at: no code of yours has failed on this rank, or it was for a lack "
    "of memory, and its frames are not kept, as they would hold tensors."
)
_open: Any = None  # the debugger between two commands


def remember(error: BaseException) -> None:
    """Have the debugger look at this error, which is cut to the user's frames."""
    if frames := error.__traceback__:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frames
        if sys.version_info >= (3, 12):
            sys.last_exc = error


def forget() -> None:
    """Release the last error's frames and what they hold."""
    global _open
    _open = None
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)


def command(line: str | None) -> DebugReply:
    """Give the debugger a command; None opens it again."""
    global _open
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        if line is None:
            _open = _begin()
        elif _open is None:
            print("The debugger is closed.")
        elif _is_last(_open, line):
            _open.forget()
            _open = None
    return DebugReply(said.getvalue(), is_open=_open is not None)


def _begin() -> Any:
    frames = getattr(sys, "last_traceback", None)
    if frames is None:
        print(_NOTHING)
        return None
    # whatever wants to read more than a line finds an end of file
    debugger = Pdb(stdin=io.StringIO(), stdout=sys.stdout)
    debugger.reset()
    debugger.setup(None, frames)
    debugger.print_stack_entry(debugger.stack[debugger.curindex])
    return debugger


def _is_last(debugger: Any, line: str) -> bool:
    """Do what a line says (`p x ;; up`); whether that ends the session."""
    debugger.stdout = sys.stdout
    try:
        parts = [debugger.precmd(part) for part in line.split(";;")]
        return any(debugger.postcmd(debugger.onecmd(part), part) for part in parts)
    except Exception as error:  # a command that has no meaning here, such as `run`
        print(f"*** {type(error).__name__}: {error}")
        return False
