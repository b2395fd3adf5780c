"""Run the user's code in the engine's namespace and report how it went. Runs on engines.

Whatever the code raises becomes a reply; nothing of it is left to ipyparallel, whose replies would
show our frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from subprocess import CalledProcessError  # nosec B404
from typing import Any

import torch
import torch.distributed as dist

from gpupool.core.machine.topology import Rank
from gpupool.core.wire.global_names import RANK_NAMES
from gpupool.core.wire.pickles import pack
from gpupool.core.wire.replies import CodeReply, Reply, Value
from gpupool.data import device as devices
from gpupool.engine import calls
from gpupool.engine.cells import error_hints
from gpupool.engine.cells.tracebacks import describe
from gpupool.engine.process import this_rank
from gpupool.engine.shell.cell_names import counting_lines
from gpupool.engine.shell.shell import disarm_exit, ended_early, noting_script_names, this_shell

_GONE = object()
MAX_VALUE_BYTES = 1 << 20  # the last expression of a cell comes along up to here


def run_source(source: str, cell_number: int | None, waits: bool) -> Reply[CodeReply]:
    """Run a cell as IPython does: magics, display of the last expression, top-level await."""
    shell = this_shell()
    if cell_number is not None:
        shell.execution_count = cell_number  # "Cell In[12]" in tracebacks means the notebook's
    started = time.monotonic()
    with QuietErrors(shell) as quiet:
        result = run_cell(shell, source, is_cell=cell_number is not None)
    quiet.passed_over(result)
    if not result.success and not ended_early(result.error_in_exec):
        # At once, as others may wait for this rank; what its device still has to do is theirs, too.
        return failed(result.error_before_exec or result.error_in_exec)
    if waits:
        _wait_for_device()
    elapsed_s = time.monotonic() - started
    packed, text = _packed_if_small(result.result)
    return Reply(CodeReply(packed, text, elapsed_s, left=not result.success))


def _wait_for_device() -> None:
    """Let the cell end when its work does: so errors and hangs of that work are the cell's own."""
    device = devices.in_use()
    if device is not None:
        device.wait()


def run_function(load: Callable[[], tuple[Any, Any, Any]]) -> Reply[CodeReply]:
    """Call the (function, args, kwargs) that `load` gives; its value comes back whole."""
    started = time.monotonic()
    try:
        function, args, kwargs = load()
        value = function(*args, **kwargs)
        _wait_for_device()
        packed, text = pack(value), _text_of(value)
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: the engine continues
        return failed(error)
    return Reply(CodeReply(packed, text, time.monotonic() - started))


def guarded(work: Callable[[], Reply[Value]]) -> Reply[Value]:
    """What `work` returns, or the error it raised as a reply."""
    try:
        return work()
    except BaseException as error:  # as above
        return failed(error)


def failed(error: BaseException) -> Reply[Any]:
    """The reply for an error."""
    return Reply(None, describe(error), context_lost=error_hints.is_context_lost(error))


def cell_names(rank: Rank) -> dict[str, Any]:
    """The names that every cell finds."""
    named = {"rank": rank.rank, "world_size": rank.world_size, "local_rank": rank.local_rank}
    return {**named, "device": torch.device(rank.device), "torch": torch, "dist": dist}


# What IPython shows from here, while a magic runs, is an error in the code that the magic runs.
_RUNS_CODE = "IPython.core.interactiveshell"


class QuietErrors:
    """While entered, IPython publishes no traceback: the client shows one.

    IPython shows an error in the script of `%run` or the body of `%%capture`, and continues. Other
    ranks may wait for this one, so such an error is raised when its magic has ended. `passed_over`
    says on stderr what was not to end the cell: an error in a hook, or in `__repr__`.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._held_back: list[BaseException] = []
        self._of_magics: list[list[BaseException]] = []  # of those that run, the innermost last
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> QuietErrors:
        shell, undo = self._shell, self._undo
        _swap(undo, shell, "_showtraceback", lambda etype, evalue, lines: None)
        # IPython prints exception groups itself
        _swap(undo, shell, "showtraceback", self._hold_back)
        _swap(undo, shell, "showsyntaxerror", self._hold_back_syntax_error)
        for name in ("run_line_magic", "run_cell_magic"):
            _swap(undo, shell, name, self._raising(getattr(shell, name)))
        for name in ("system", "getoutput"):
            _swap(undo, shell, name, _interruptible(getattr(shell, name)))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _hold_back(self, exc_tuple: Any = None, *args: Any, **options: Any) -> None:
        error = (exc_tuple or sys.exc_info())[1] or getattr(sys, "last_value", None)  # of %tb
        by = sys._getframe(1).f_globals.get("__name__")
        if error is not None:
            of_code = self._of_magics and by == _RUNS_CODE
            (self._of_magics[-1] if of_code else self._held_back).append(error)

    def _hold_back_syntax_error(self, *args: Any, **options: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None:
            (self._of_magics[-1] if self._of_magics else self._held_back).append(error)

    def _raising(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def run_magic(name: str, *args: Any, **options: Any) -> Any:
            if run.__name__ == "run_line_magic":  # it looks at its caller's variables
                options["_stack_depth"] = options.get("_stack_depth", 1) + 1
            self._of_magics.append([])
            value, shown = None, self._of_magics[-1]
            try:
                with noting_script_names(self._shell) if name == "run" else nullcontext():
                    value = run(name, *args, **options)
            except CalledProcessError:  # %%bash and its like
                if calls.is_interrupted():
                    raise KeyboardInterrupt from None
                raise
            except BaseException:
                if not shown:
                    raise
            finally:
                self._of_magics.pop()
                _restore_names(self._shell)  # after %reset
            if shown:
                raise shown[0]
            return value

        return run_magic

    def passed_over(self, result: Any) -> None:
        """Report the errors that are not the cell's own."""
        own = result.error_before_exec or result.error_in_exec
        if isinstance(own, KeyboardInterrupt):  # IPython's word for it is another one here
            return
        for error in self._held_back:
            if error is not own:
                print(describe(error).error.traceback, file=sys.stderr)


def _swap(undo: contextlib.ExitStack, shell: Any, name: str, value: object) -> None:
    """Set an attribute of the shell until `undo` is closed; a method of its class comes back."""
    if name in vars(shell):
        undo.callback(setattr, shell, name, getattr(shell, name))
    else:
        undo.callback(vars(shell).pop, name, None)
    setattr(shell, name, value)


def _interruptible(run: Callable[[str], Any]) -> Callable[[str], Any]:
    """`!command`. IPython ends the command at an interrupt and lets the cell continue."""

    @functools.wraps(run)
    def run_command(*args: Any, **options: Any) -> Any:
        value = run(*args, **options)
        if calls.is_interrupted():
            raise KeyboardInterrupt
        return value

    return run_command


def run_cell(shell: Any, source: str, is_cell: bool = True) -> Any:
    """Run a cell in `shell`, in this thread, and give IPython's result; top-level await works.

    The rank's names mean after it what they meant before, unless its own code has bound them: what
    `from math import *`, `%reset` or `%run` do to them is not meant.
    """
    names = shell.user_ns
    _restore_names(shell)
    before = {name: names[name] for name in RANK_NAMES}
    with counting_lines(shell, source, is_cell) as compiler:
        result = _run_cell(shell, source)
    if any(names.get(name, _GONE) is not value for name, value in before.items()):
        kept = compiler.names_bound() & names.keys()
        for name in RANK_NAMES - kept:
            if names.get(name) is not before[name]:
                names.pop(name, None)
        _restore_names(shell)
    return result


def _restore_names(shell: Any) -> None:
    """Have the names that are the rank's and the shell's mean something."""
    names = shell.user_ns
    if lost := RANK_NAMES - names.keys():
        own = cell_names(this_rank())
        names.update({name: own[name] for name in lost})
    if "get_ipython" not in names or names.get("exit") is shell.exiter:  # after %reset
        shell.init_user_ns()
        names.setdefault("__name__", "__main__")
        disarm_exit(shell)


def _run_cell(shell: Any, source: str) -> Any:
    usual, shell.loop_runner = shell.loop_runner, _run_in_loop
    try:
        return shell.run_cell(source, store_history=False)
    finally:
        shell.loop_runner = usual


def _run_in_loop(run: Coroutine[Any, Any, Any]) -> Any:
    """IPython's result of a cell that awaits."""
    # The process's own event loop is running this call, and loops do not nest: it is hidden while
    # one for the cell runs. (In another thread the cell would not hear an interrupt.)
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            return _run_task(runner.get_loop(), run)
    finally:
        asyncio._set_running_loop(outer)


def _run_task(loop: asyncio.AbstractEventLoop, run: Coroutine[Any, Any, Any]) -> Any:
    """IPython's result of `run`; an interrupt is raised where the cell waits."""
    task = loop.create_task(run)
    try:
        return loop.run_until_complete(task)
    except KeyboardInterrupt:  # met the loop, not the cell
        task.cancel()
        result = loop.run_until_complete(task)
        if isinstance(result.error_in_exec, asyncio.CancelledError):
            frames = result.error_in_exec.__traceback__
            result.error_in_exec = KeyboardInterrupt().with_traceback(frames)
        return result


def _packed_if_small(value: object) -> tuple[bytes | None, str]:
    """The value, if it can travel with the reply, and its text; None has neither."""
    if value is None:
        return None, ""
    try:
        packed = pack(value, MAX_VALUE_BYTES)
    except Exception:  # too large, or a thing that cannot travel (lock, socket): the text can
        packed = None
    return packed, _text_of(value)


def _text_of(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:  # IPython, which shows the value, has said so; the cell continues
        return f"<{type(value).__name__}: its __repr__ raised {type(error).__name__}>"
