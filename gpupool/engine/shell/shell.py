"""The IPython shell that cells run in. Runs on engines."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import getpass
import pdb
import sys
import warnings
from collections.abc import Coroutine
from typing import Any, NoReturn

from IPython.core import debugger, page
from IPython.core.autocall import ZMQExitAutocall
from IPython.core.error import StdinNotImplementedError
from IPython.core.getipython import get_ipython

_NO_INPUT = (
    "a rank cannot ask for input. Ask in a cell of the notebook itself and use the answer in the "
    "next %%spmd cell; `%gpupool env NAME` sends a secret of the notebook's environment. "
    "`%gpupool debug RANK` opens the debugger where that rank failed last."
)


def this_shell() -> Any:
    """The shell of this process."""
    return get_ipython()


def adapt_to_rank(shell: Any) -> None:
    """Have `exit` end the cell and interrupts an `await`; nothing waits or is kept for later."""
    shell.exiter = _Exit(shell)  # type: ignore[no-untyped-call]
    shell.init_user_ns()
    # IPython's advice on SystemExit is not that for an engine.
    warnings.filterwarnings("ignore", message="To exit: use 'exit'")
    _refuse_prompts(shell)
    shell.loop_runner = _run_in_loop
    # IPython keeps what cells print and display for a saved history. Nothing here reads that.
    shell._tee = lambda channel: contextlib.nullcontext()
    shell.events.register("post_run_cell", lambda _: shell.history_manager.outputs.clear())


class _Exit(ZMQExitAutocall):
    """`exit`, `exit()` and `exit(3)` in a cell."""

    def __call__(self, code: object = None) -> None:
        __tracebackhide__ = True
        print("exit and quit end the cell. `%gpupool stop` ends the pool.", file=sys.stderr)
        raise SystemExit(code)


def _refuse_prompts(shell: Any) -> None:
    """Have all that would ask the user for a line, and wait or read an end of file, say at once
    that a rank cannot. What `x?` would open in a pager is printed."""

    def refuse(*_: object, **__: object) -> NoReturn:
        __tracebackhide__ = True  # the debugger opens in the caller's frame
        raise StdinNotImplementedError(_NO_INPUT)

    def print_page(text: Any, *_: object, **__: object) -> None:
        print(text["text/plain"] if isinstance(text, dict) else text)

    builtins.input = getpass.getpass = sys.breakpointhook = refuse
    pdb.set_trace = debugger.set_trace = refuse
    shell.debugger = lambda force=False: print(_NO_INPUT, file=sys.stderr)  # %debug, `%pdb on`
    shell.set_hook("show_in_pager", page.as_hook(print_page), 0)


def _run_in_loop(run: Coroutine[Any, Any, Any]) -> Any:
    """IPython's result of a cell that awaits; an interrupt is raised where the cell waits."""
    # The process's own event loop is running this call, and loops do not nest: it is hidden while
    # one for the cell runs. (In another thread the cell would not hear an interrupt.)
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            loop = runner.get_loop()
            task = loop.create_task(run)
            try:
                return loop.run_until_complete(task)
            except KeyboardInterrupt:  # met the loop, not the cell
                task.cancel()
                result = loop.run_until_complete(task)
                if isinstance(error := result.error_in_exec, asyncio.CancelledError):
                    result.error_in_exec = KeyboardInterrupt().with_traceback(error.__traceback__)
                return result
    finally:
        asyncio._set_running_loop(outer)
