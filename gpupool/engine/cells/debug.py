"""The debugger on this rank's last error, one command at a time. Runs on engines.

The frames stay where they are: `sys.last_exc` holds them, as in every interactive Python, until
the next error. Between two commands nothing waits: the rank is free for anything else.
"""

from __future__ import annotations

import contextlib
import io
import sys
from types import TracebackType
from typing import Any

from IPython.core.debugger import Pdb

from gpupool.core.wire.replies import DebugReply

_frames: TracebackType | None = None  # those of the last error that are the user's
_why_none = _NOTHING = "No code of yours has failed on this rank: there is nothing to look at."
_open: Any = None  # the debugger between two commands


def remember(error: BaseException) -> None:
    """Note what the debugger is to look at: the last error, cut to the user's frames."""
    global _frames, _why_none
    if error.__traceback__ is None:
        return
    _frames, _why_none = error.__traceback__, _NOTHING
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, _frames
    if sys.version_info >= (3, 12):
        sys.last_exc = error


def forget(why: str) -> None:
    """Release the last error's frames and what they hold; who asks for them reads `why`."""
    global _frames, _why_none, _open
    _frames, _why_none, _open = None, why, None
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


class _Debugger(Pdb):
    def do_interact(self, arg: str) -> None:
        """Not here: it would read from the rank's own input."""
        self.error("interact asks for input, which a rank cannot. `p EXPRESSION` and `!STATEMENT`.")


def _begin() -> Any:
    if _frames is None:
        print(_why_none)
        return None
    # whatever wants to read more than a line finds an end of file
    debugger = _Debugger(stdin=io.StringIO(), stdout=sys.stdout)
    debugger.reset()
    debugger.setup(None, _frames)
    debugger.print_stack_entry(debugger.stack[debugger.curindex])
    return debugger


def _is_last(debugger: Any, line: str) -> bool:
    """Do what a line says, in all its parts (`p x ;; up`); whether that ends the session."""
    debugger.stdout = sys.stdout
    debugger.cmdqueue = [line]
    try:
        while debugger.cmdqueue:
            part = debugger.precmd(debugger.cmdqueue.pop(0))
            if debugger.postcmd(debugger.onecmd(part), part):
                return True
    except Exception as error:  # a command that has no meaning here, such as `run`
        print(f"*** {type(error).__name__}: {error}")
    return False
