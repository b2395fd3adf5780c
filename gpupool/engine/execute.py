"""Run the user's code in the engine's namespace and report how it went. Runs on engines.

Whatever the code raises becomes a plain dict; nothing of it is left to ipyparallel, whose replies
would show our frames. A dict has either "value" and "text" or "error".
"""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle
import IPython
import torch
from IPython.core.getipython import get_ipython

import gpupool
from gpupool.engine.values import pickle_value

MAX_VALUE_BYTES = 1 << 20  # the last expression of a cell comes along up to here

# Frames of these lead to the user's code, or are all there is when an argument was wrong.
_NOT_THE_USERS = tuple(
    str(Path(module).parent) for module in (gpupool.__file__, IPython.__file__, torch.__file__)
)


def run_source(source: str, cell_number: int | None) -> dict[str, Any]:
    """Run a cell as IPython does: magics, display of the last expression, top-level await."""
    shell: Any = get_ipython()
    if cell_number is not None:
        shell.execution_count = cell_number  # "Cell In[12]" in tracebacks means the notebook's
    started = time.monotonic()
    with _QuietErrors(shell):
        result = _run_cell(shell, source)
    elapsed_s = time.monotonic() - started
    if result.success:
        return {**_value_reply(result.result), "elapsed_s": elapsed_s}
    error = result.error_before_exec or result.error_in_exec
    return {"error": describe(error), "elapsed_s": elapsed_s}


def run_function(pickled: bytes) -> dict[str, Any]:
    """Call a pickled (function, args, kwargs); its return value comes back whole."""
    started = time.monotonic()
    try:
        function, args, kwargs = cloudpickle.loads(pickled)
        value = function(*args, **kwargs)
        reply: dict[str, Any] = {"value": pickle_value(value), "text": repr(value)}
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
    """The error as plain data, its traceback formatted without frames of IPython or gpupool."""
    shell: Any = get_ipython()
    frames = _users_frames(error.__traceback__)
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
    return {
        "ename": kind.__name__,
        "evalue": evalue,
        "traceback": "\n".join(lines),
        "failed_at": time.time(),
    }


def disarm_exit() -> None:
    """Make `exit` and `quit` in a cell say what to do instead of ending the engine."""
    shell: Any = get_ipython()

    def ask_exit() -> None:
        print(
            "exit and quit do not end an engine. `%gpupool stop` ends the pool; `return` from a "
            "function or raise an exception to leave a cell early.",
            file=sys.stderr,
        )

    shell.ask_exit = ask_exit
    # IPython's advice on SystemExit, which is not that for an engine either
    warnings.filterwarnings("ignore", message="To exit: use 'exit'")


class _QuietErrors:
    """While entered, IPython publishes no traceback: the client shows one."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __enter__(self) -> None:
        self._shell._showtraceback = lambda etype, evalue, lines: None

    def __exit__(self, *_: object) -> None:
        del self._shell._showtraceback  # the class's own method again


def _run_cell(shell: Any, source: str) -> Any:
    if not _awaits(shell, source):
        return shell.run_cell(source, store_history=False)
    # The engine's own event loop is running this call, so top-level await needs another one.
    with ThreadPoolExecutor(1, thread_name_prefix="gpupool-await") as thread:
        transformed = shell.transform_cell(source)
        run = shell.run_cell_async(source, store_history=False, transformed_cell=transformed)
        return thread.submit(asyncio.run, run).result()


def _awaits(shell: Any, source: str) -> bool:
    try:
        return bool(shell.should_run_async(source, transformed_cell=shell.transform_cell(source)))
    except SyntaxError:  # run_cell reports it
        return False


def _value_reply(value: object) -> dict[str, Any]:
    if value is None:
        return {"value": None, "text": ""}
    try:
        pickled = pickle_value(value, MAX_VALUE_BYTES)
    except Exception:  # too large, or a thing that cannot travel (lock, socket): the text can
        pickled = None
    return {"value": pickled, "text": repr(value)}


def _users_frames(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame on that is the user's; None if there is no such frame."""
    while frames and frames.tb_frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frames = frames.tb_next
    return frames
