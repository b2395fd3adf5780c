"""Run the user's code in the engine's namespace and report how it went. Runs on engines.

Whatever the code raises becomes a reply; nothing of it is left to ipyparallel, whose replies would
show our frames.
"""

from __future__ import annotations

import asyncio
import functools
import re
import sys
import time
from collections.abc import Callable, Coroutine
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
from gpupool.engine.cells.tracebacks import describe, show_source_of_cells, shown
from gpupool.engine.process import this_rank
from gpupool.engine.shell.cell_names import CellCompiler
from gpupool.engine.shell.shell import ended_early, this_shell

MAX_VALUE_BYTES = 1 << 20  # the last expression of a cell comes along up to here


def run_source(source: str, cell_number: int | None, waits: bool) -> Reply[CodeReply]:
    """Run a cell as IPython does: magics, display of the last expression, top-level await."""
    shell = this_shell()
    if cell_number is not None:
        shell.execution_count = cell_number  # "Cell In[12]" in tracebacks means the notebook's
    started = time.monotonic()
    result, passed_over = run_cell(shell, source, is_cell=cell_number is not None)
    for other in passed_over:
        print(shown(other), file=sys.stderr)
    error = result.error_before_exec or result.error_in_exec
    if isinstance(error, CalledProcessError) and calls.is_interrupted():  # `%%bash` and its like
        error = KeyboardInterrupt().with_traceback(error.__traceback__)
    if error is not None and not ended_early(error):
        # At once, as others may wait for this rank; what its device still has to do is theirs, too.
        return failed(error)
    if waits:
        _wait_for_device()
    elapsed_s = time.monotonic() - started
    packed, text = _packed_if_small(result.result)
    return Reply(CodeReply(packed, text, elapsed_s, left=error is not None))


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


# Who shows an error in IPython: of a file that it runs, or of a cell, whose result has it as well.
_OF_FILES = {"safe_execfile", "safe_run_module"}
_OF_CELLS = {"run_code", "run_ast_nodes", "run_cell_async"}
# What binds names that nobody has written down, and takes them away.
_BINDS_ANY = re.compile(r"import\s*\*|%(?:run|reset|pylab)\b")


def run_cell(shell: Any, source: str, is_cell: bool = True) -> tuple[Any, list[BaseException]]:
    """Run a cell in `shell`, in this thread; top-level await works.

    Other ranks may wait for this one. So an error in the script of `%run` or the body of
    `%%capture`, which IPython shows, ends the cell. Nothing is shown here: the client does it.

    Returns:
        IPython's result, and the errors that did not end the cell: in a hook, or in `__repr__`.
    """
    passed_over, of_files = list[BaseException](), list[BaseException]()
    run, run_magic = shell.run_cell, shell.run_line_magic

    def run_nested(*args: Any, **options: Any) -> Any:
        result = run(*args, **options)
        result.raise_error()
        return result

    def run_line_magic(name: str, line: str, _stack_depth: int = 1) -> Any:
        value = run_magic(name, line, _stack_depth + 1)
        if of_files:
            raise of_files.pop()
        return value

    def show(exc_tuple: Any = None, *_: Any, **__: Any) -> None:
        error = (exc_tuple or sys.exc_info())[1]
        by = sys._getframe(1).f_code.co_name
        if error is not None and by not in _OF_CELLS:
            (of_files if by in _OF_FILES else passed_over).append(error)

    names = shell.user_ns
    before = {name: names[name] for name in RANK_NAMES & names.keys()}
    own = {
        "run_cell": run_nested,
        "run_line_magic": run_line_magic,
        "showtraceback": show,
        "showsyntaxerror": lambda *_, **__: None,
    }
    vars(shell).update(own)
    try:
        with shell.compile.compiling(source, is_cell):
            result = run(source, store_history=False)
    finally:  # those of its class again
        for name in own:
            vars(shell).pop(name, None)
    if "exit" not in names:
        shell.init_user_ns()
        names.setdefault("__name__", "__main__")
    if _BINDS_ANY.search(source):
        names.update(before)
    for name, value in cell_names(this_rank()).items():
        names.setdefault(name, value)
    return result, passed_over


def adapt(shell: Any) -> None:
    """Have this shell run cells as a rank must: the right lines, and interrupts end all of them."""
    shell.compile = CellCompiler()
    show_source_of_cells()
    shell.loop_runner = _run_in_loop
    for name in ("system", "getoutput"):
        setattr(shell, name, _interruptible(getattr(shell, name)))


def _interruptible(run: Callable[..., Any]) -> Callable[..., Any]:
    """`!command`. IPython ends the command at an interrupt and lets the cell continue."""

    @functools.wraps(run)
    def run_command(*args: Any, **options: Any) -> Any:
        value = run(*args, **options)
        if calls.is_interrupted():
            raise KeyboardInterrupt
        return value

    return run_command


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
