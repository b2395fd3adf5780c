"""Run the user's code in the engine's namespace and report how it went. Runs on engines.

Whatever the code raises becomes a plain dict; nothing of it is left to ipyparallel, whose replies
would show our frames. A dict has either "value" and "text" or "error".
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import torch
import torch.distributed as dist

from gpupool.core.parcels import pack
from gpupool.engine import causes
from gpupool.engine.recording import swap
from gpupool.engine.shell import ended_early, this_shell
from gpupool.engine.sources import counting_lines
from gpupool.engine.tracebacks import describe

MAX_VALUE_BYTES = 1 << 20  # the last expression of a cell comes along up to here


def run_source(source: str, cell_number: int | None) -> dict[str, Any]:
    """Run a cell as IPython does: magics, display of the last expression, top-level await."""
    shell = this_shell()
    if cell_number is not None:
        shell.execution_count = cell_number  # "Cell In[12]" in tracebacks means the notebook's
    started = time.monotonic()
    with QuietErrors(shell) as quiet:
        result = run_cell(shell, source, is_cell=cell_number is not None)
    quiet.passed_over(result)
    return cell_reply(result, result.result, time.monotonic() - started)


def cell_reply(result: Any, value: object, elapsed_s: float) -> dict[str, Any]:
    """The reply for IPython's result of a cell and the value of its last expression."""
    if result.success or ended_early(result.error_in_exec):
        return {**_value_reply(value), "elapsed_s": elapsed_s}
    error = result.error_before_exec or result.error_in_exec
    return {**failed(error), "elapsed_s": elapsed_s}


def run_function(load: Callable[[], tuple[Any, Any, Any]]) -> dict[str, Any]:
    """Call the (function, args, kwargs) that `load` gives; its value comes back whole."""
    started = time.monotonic()
    try:
        function, args, kwargs = load()
        value = function(*args, **kwargs)
        reply: dict[str, Any] = {"value": pack(value), "text": _text_of(value)}
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: the engine goes on
        reply = failed(error)
    return {**reply, "elapsed_s": time.monotonic() - started}


def guarded(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `work` returns, or the error it raised as a reply."""
    try:
        return work()
    except BaseException as error:  # as above
        return failed(error)


def failed(error: BaseException) -> dict[str, Any]:
    """The reply for an error; with "context_lost" if this process can use its GPU no more."""
    lost = {"context_lost": True} if causes.is_context_lost(error) else {}
    return {"error": describe(error), **lost}


def cell_names(rank: Mapping[str, Any]) -> dict[str, Any]:
    """The names that every cell finds."""
    named = {key: rank[key] for key in ("rank", "world_size", "local_rank")}
    return {**named, "device": torch.device(rank["device"]), "torch": torch, "dist": dist}


class QuietErrors:
    """While entered, IPython publishes no traceback: the client shows one.

    `passed_over` says on stderr what was not to end the cell: an error in the body of `%%capture`,
    or in a hook.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._held_back: list[BaseException] = []
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> QuietErrors:
        swap(self._undo, self._shell, "_showtraceback", lambda etype, evalue, lines: None)
        # by itself it prints exception groups
        swap(self._undo, self._shell, "showtraceback", self._hold_back)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _hold_back(self, exc_tuple: Any = None, *args: Any, **options: Any) -> None:
        error = (exc_tuple or sys.exc_info())[1]
        if error is not None:
            self._held_back.append(error)

    def passed_over(self, result: Any) -> None:
        """Tell of the errors that are not the cell's own."""
        own = result.error_before_exec or result.error_in_exec
        if isinstance(own, KeyboardInterrupt):  # IPython's word for it is another one here
            return
        for error in self._held_back:
            if error is not own:
                print(describe(error)["traceback"], file=sys.stderr)


def run_cell(shell: Any, source: str, is_cell: bool = True) -> Any:
    """Run a cell in `shell`, in this thread, and give IPython's result; top-level await works."""
    with counting_lines(shell, source, is_cell):
        return _run_cell(shell, source)


def _run_cell(shell: Any, source: str) -> Any:
    if not _awaits(shell, source):
        return shell.run_cell(source, store_history=False)
    transformed = shell.transform_cell(source)
    run = shell.run_cell_async(source, store_history=False, transformed_cell=transformed)
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


def _awaits(shell: Any, source: str) -> bool:
    try:
        return bool(shell.should_run_async(source, transformed_cell=shell.transform_cell(source)))
    except SyntaxError:  # run_cell reports it
        return False


def _value_reply(value: object) -> dict[str, Any]:
    if value is None:
        return {"value": None, "text": ""}
    try:
        pickled = pack(value, MAX_VALUE_BYTES)
    except Exception:  # too large, or a thing that cannot travel (lock, socket): the text can
        pickled = None
    return {"value": pickled, "text": _text_of(value)}


def _text_of(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:  # IPython, which shows the value, has said so; the cell goes on
        return f"<{type(value).__name__}: its __repr__ raised {type(error).__name__}>"
