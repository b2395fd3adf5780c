"""Run the user's code in the engine's namespace and report how it went. Runs on engines.

Whatever it raises becomes a reply: those of ipyparallel would show our frames.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from subprocess import CalledProcessError  # nosec B404
from typing import Any

import torch
import torch.distributed as dist

from gpupool.core import current
from gpupool.core.errors import Pruned
from gpupool.core.machine.topology import Rank
from gpupool.core.wire.events import ReportEvent
from gpupool.core.wire.pickles import pack
from gpupool.core.wire.replies import CodeReply, Reply, Value
from gpupool.data import device as devices
from gpupool.engine import calls, control
from gpupool.engine.cells import torchrun
from gpupool.engine.cells.errors import describe, shown
from gpupool.engine.output.emit import emit
from gpupool.engine.process import this_rank
from gpupool.engine.shell import adapt_to_rank, this_shell

MAX_VALUE_BYTES = 1 << 20  # the last expression of a cell comes along up to here


def run_source(source: str, cell_number: int | None, waits: bool) -> Reply[CodeReply]:
    """Run a cell as IPython does: magics, display of the last expression, top-level await."""
    shell = this_shell()
    shell.execution_count = cell_number or 0  # "Cell In[12]" in tracebacks means the notebook's
    started = time.monotonic()
    result = _run_cell(shell, source)
    for name, value in cell_names(this_rank()).items():
        shell.user_ns.setdefault(name, value)
    error = result.error_before_exec or result.error_in_exec
    if isinstance(error, CalledProcessError) and calls.is_interrupted():  # `%%bash` and its like
        error = KeyboardInterrupt().with_traceback(error.__traceback__)
    has_ended = isinstance(error, SystemExit) and error.code in (None, 0)  # it had no more to do
    if error is not None and not has_ended:
        # At once, as others may wait for this rank; what its device still has to do is theirs, too.
        return _failed(error)
    if waits:
        _wait_for_device()
    elapsed_s = time.monotonic() - started
    packed, text = _packed_if_small(result.result)
    return Reply(CodeReply(packed, text, elapsed_s, left=has_ended))


def _wait_for_device() -> None:
    """Let the cell end when its work does: so errors and hangs of that work are the cell's own."""
    device = devices.in_use()
    if device is not None:
        device.wait()


def run_function(load: Callable[[], Any]) -> Reply[CodeReply]:
    """Call the (function, args, kwargs) that `load` gives; its value comes back whole."""
    started = time.monotonic()
    (function, args, kwargs), _parts = load()
    value = function(*args, **kwargs)
    _wait_for_device()
    return Reply(CodeReply(pack(value), _text_of(value), time.monotonic() - started))


def run_task(load: Callable[[], Any]) -> Reply[CodeReply]:
    """The same on this rank alone; what it reports is sent, unless it is not worth its time."""
    name = f"{calls.current()}"

    def report(step: int, values: Mapping[str, float]) -> None:
        emit([ReportEvent(step, dict(values))])
        if control.stop_requested(name):
            raise Pruned(f"after step {step}")

    heard = current.trial.set(report)
    try:
        with torchrun.alone():
            return run_function(load)
    finally:
        current.trial.reset(heard)


def guarded(work: Callable[[], Reply[Value]]) -> Reply[Value]:
    """What `work` returns, or the error it raised as a reply."""
    try:
        return work()
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: the engine continues
        return _failed(error)


def _failed(error: BaseException) -> Reply[Any]:
    raised = describe(error)
    return Reply(None, raised, context_lost=bool(raised.error.hint))


def cell_names(rank: Rank) -> dict[str, Any]:
    named = {"rank": rank.rank, "world_size": rank.world_size, "local_rank": rank.local_rank}
    return {**named, "device": torch.device(rank.device), "torch": torch, "dist": dist}


def _run_cell(shell: Any, source: str) -> Any:
    """IPython's result of a cell. An error in the script of `%run` or the body of `%%capture`,
    which IPython only shows, ends the cell: others may wait for this rank. The client shows it; an
    error in a hook or in `__repr__`, which ends nothing, is shown here."""
    run = shell.run_cell

    def run_nested(*args: Any, **options: Any) -> Any:
        result = run(*args, **options)
        result.raise_error()
        return result

    def show(exc_tuple: Any = None, *_: Any, **__: Any) -> None:
        error = (exc_tuple or sys.exc_info())[1]
        by = sys._getframe(1).f_code.co_name
        if error is None or by in ("run_code", "run_ast_nodes", "run_cell_async", "_run_cell"):
            return  # the cell's result has it
        if by.startswith("safe_"):  # runs a file
            raise error
        print(shown(error), file=sys.stderr)

    own = {"run_cell": run_nested, "showtraceback": show, "showsyntaxerror": lambda *_, **__: None}
    shell.compile.cell = source
    vars(shell).update(own)
    try:
        return run(source, store_history=False)
    finally:  # those of its class again
        for name in own:
            vars(shell).pop(name, None)


def adapt(shell: Any) -> None:
    """Have this shell run cells as a rank must."""
    adapt_to_rank(shell)
    for name in ("system", "getoutput"):
        setattr(shell, name, _interruptible(getattr(shell, name)))


def _interruptible(run: Callable[..., Any]) -> Callable[..., Any]:
    """`!command`. IPython ends the command at an interrupt and lets the cell continue."""

    def run_command(*args: Any, **options: Any) -> Any:
        value = run(*args, **options)
        if calls.is_interrupted():
            raise KeyboardInterrupt
        return value

    return run_command


def _packed_if_small(value: object) -> tuple[bytes | None, str]:
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
