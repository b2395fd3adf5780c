"""The IPython shell that cells run in. Runs on engines."""

from __future__ import annotations

import builtins
import contextlib
import getpass
import pdb
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from IPython.core import debugger, page
from IPython.core.autocall import ZMQExitAutocall
from IPython.core.error import StdinNotImplementedError
from IPython.core.getipython import get_ipython

from gpupool.core.errors import PoolError

_INPUT = "Ask in a cell of the notebook itself and use the answer in the next %%spmd cell."
_GETPASS = "Put the secret into the notebook's environment and send it with `%gpupool env NAME`."
_DEBUG = "`%gpupool debug RANK` opens the debugger where that rank failed last."
_STOPPED = "The cell ends here, and `%gpupool debug RANK` opens the debugger in this frame."


def this_shell() -> Any:
    """The shell of this process."""
    return get_ipython()


def disarm_exit(shell: Any) -> None:
    """Make `exit` and `quit` end the cell, as they end a script, and not the process."""
    shell.exiter = leave = _Exit(shell)  # type: ignore[no-untyped-call]
    shell.user_ns.update({"exit": leave, "quit": leave})
    shell.user_ns_hidden.update({"exit": leave, "quit": leave})  # not the user's: %who, %reset
    # IPython's advice on SystemExit is not that for an engine.
    warnings.filterwarnings("ignore", message="To exit: use 'exit'")


class _Exit(ZMQExitAutocall):
    """`exit`, `exit()` and `exit(3)` in a cell."""

    def __call__(self, code: object = None) -> None:
        __tracebackhide__ = True
        print("exit and quit end the cell. `%gpupool stop` ends the pool.", file=sys.stderr)
        raise SystemExit(code)


def ended_early(error: object) -> bool:
    """Whether a cell ended because it had nothing more to do: `sys.exit()`, `sys.exit(0)`."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def refuse_prompts(shell: Any) -> None:
    """Have everything that would ask the user for a line say at once that a rank cannot.

    Without a front end that listens it would wait, or read an end of file. What `x?` would open
    in a pager is printed.
    """

    def refusing(what: str, advice: str) -> Callable[..., Any]:
        def refuse(*_: object, **__: object) -> NoReturn:
            __tracebackhide__ = True  # the debugger opens in the caller's frame
            raise StdinNotImplementedError(f"{what}: a rank cannot ask for input. {advice}")

        return refuse

    def say(force: bool = False) -> None:
        print(f"A rank cannot ask for input. {_DEBUG}", file=sys.stderr)

    builtins.input = refusing("input()", _INPUT)
    getpass.getpass = refusing("getpass()", _GETPASS)
    sys.breakpointhook = refusing("breakpoint()", _STOPPED)
    pdb.set_trace = debugger.set_trace = refusing("set_trace()", _STOPPED)
    shell.debugger = say  # of %debug and `%pdb on`
    shell.set_hook("show_in_pager", page.as_hook(_print_page), 0)


def refuse_magics(shell: Any) -> None:
    """Have the magics of the notebook say, in a cell of a rank, where they belong."""

    def refuse(line: str, cell: str | None = None) -> NoReturn:
        raise PoolError(
            "%gpupool and %%spmd belong to the notebook, and this is a rank: write them in a cell "
            "of their own, without %%spmd above them."
        )

    for name in ("gpupool", "spmd", "%spmd"):  # the last is `%%spmd` below other code
        shell.register_magic_function(refuse, "line_cell", name)


def _print_page(text: Any, *_: object, **__: object) -> None:
    print(text["text/plain"] if isinstance(text, dict) else text)


def keep_no_outputs(shell: Any) -> None:
    """Let `shell` not store what cells print and display, as it does for a saved history.

    Nothing on an engine reads that, and a cell that prints 100 MB would keep several times as much.
    """
    shell._tee = lambda channel: contextlib.nullcontext()
    kept = getattr(shell.history_manager, "outputs", {})  # older versions of IPython have none
    shell.events.register("post_run_cell", lambda _: kept.clear())
