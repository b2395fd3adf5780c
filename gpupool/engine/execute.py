"""Run the user's code in the engine's namespace and report how it went. Runs on engines.

Whatever the code raises becomes a plain dict; nothing of it is left to ipyparallel, whose replies
would show our frames. A dict has either "value" and "text" or "error".
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import IPython
import torch
import torch.distributed as dist

import gpupool
from gpupool.core.parcels import pack
from gpupool.engine import debug, here
from gpupool.engine.shell import ended_early, this_shell

MAX_VALUE_BYTES = 1 << 20  # the last expression of a cell comes along up to here

# Frames of these lead to the user's code, or are all there is when an argument was wrong.
_NOT_THE_USERS = tuple(
    str(Path(module).parent) for module in (gpupool.__file__, IPython.__file__, torch.__file__)
)


def run_source(source: str, cell_number: int | None) -> dict[str, Any]:
    """Run a cell as IPython does: magics, display of the last expression, top-level await."""
    shell = this_shell()
    if cell_number is not None:
        shell.execution_count = cell_number  # "Cell In[12]" in tracebacks means the notebook's
    started = time.monotonic()
    with _QuietErrors(shell):
        result = run_cell(shell, source)
    return cell_reply(result, result.result, time.monotonic() - started)


def cell_reply(result: Any, value: object, elapsed_s: float) -> dict[str, Any]:
    """The reply for IPython's result of a cell and the value of its last expression."""
    if result.success or ended_early(result.error_in_exec):
        return {**_value_reply(value), "elapsed_s": elapsed_s}
    error = result.error_before_exec or result.error_in_exec
    return {"error": describe(error), "elapsed_s": elapsed_s}


def run_function(load: Callable[[], tuple[Any, Any, Any]]) -> dict[str, Any]:
    """Call the (function, args, kwargs) that `load` gives; its value comes back whole."""
    started = time.monotonic()
    try:
        function, args, kwargs = load()
        value = function(*args, **kwargs)
        reply: dict[str, Any] = {"value": pack(value), "text": repr(value)}
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: the engine goes on
        reply = {"error": describe(error)}
    return {**reply, "elapsed_s": time.monotonic() - started}


def guarded(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `work` returns, or the error it raised as a reply."""
    try:
        return work()
    except BaseException as error:  # as above
        return {"error": describe(error)}


def describe(error: BaseException) -> dict[str, Any]:
    """The error as plain data, its traceback formatted without frames of IPython or gpupool.

    In the notebook's own process the exception comes along, its traceback cut to those frames.
    """
    shell = this_shell()
    frames = _users_frames(error.__traceback__)
    debug.remember(error, frames)
    evalue = str(error)
    # Python 3.13 raises a SyntaxError under a private name when a cell ends too early.
    kind = next(base for base in type(error).__mro__ if not base.__name__.startswith("_"))
    if isinstance(error, SyntaxError):
        evalue = f"{error.msg} (line {error.lineno})"  # its own text names a temporary file
        lines = shell.SyntaxTB.structured_traceback(kind, error, [])
    elif hasattr(error, "_render_traceback_"):
        lines = error._render_traceback_()
    elif frames is None:
        lines = traceback.format_exception_only(error)
    else:
        lines = shell.InteractiveTB.structured_traceback(kind, error, frames, tb_offset=0)
    described = {
        "ename": kind.__name__,
        "evalue": evalue,
        "traceback": "\n".join(lines),
        "failed_at": time.time(),
    }
    if here.is_inline():
        described["exception"] = error.with_traceback(frames)
    return described


def cell_names(rank: Mapping[str, Any]) -> dict[str, Any]:
    """The names that every cell finds."""
    named = {key: rank[key] for key in ("rank", "world_size", "local_rank")}
    return {**named, "device": torch.device(rank["device"]), "torch": torch, "dist": dist}


class _QuietErrors:
    """While entered, IPython publishes no traceback: the client shows one."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __enter__(self) -> None:
        self._shell._showtraceback = lambda etype, evalue, lines: None

    def __exit__(self, *_: object) -> None:
        del self._shell._showtraceback  # the class's own method again


def run_cell(shell: Any, source: str) -> Any:
    """Run a cell in `shell`, in this thread, and give IPython's result; top-level await works."""
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
    return {"value": pickled, "text": repr(value)}


def _users_frames(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame on that is the user's; None if there is no such frame.

    Frames at its end that have a `__tracebackhide__` go as well: handlers of signals.
    """
    while frames and frames.tb_frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frames = frames.tb_next
    last = frame = frames
    while frame is not None:
        if "__tracebackhide__" not in frame.tb_frame.f_locals:
            last = frame
        frame = frame.tb_next
    if last is not None:
        last.tb_next = None
    return frames
