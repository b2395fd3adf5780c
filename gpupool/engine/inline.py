"""The notebook's own process as rank 0 of 1. Runs there, reached as `invoke.own_rank`.

What an engine has for itself (environment, namespace, streams, shell, process group) belongs to the
user here. `leave` puts back what `join` has changed, unless the user has changed it again.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from IPython.core.getipython import get_ipython

from gpupool.core import current
from gpupool.core.errors import PlacementError, PoolError
from gpupool.core.machine.topology import Rank
from gpupool.core.wire import environ, invoke
from gpupool.core.wire.calls import Call, RunSource
from gpupool.core.wire.output import OnMessage, OutputKind
from gpupool.core.wire.pickles import Packed, Source
from gpupool.core.wire.replies import CodeReply, Reply, Value
from gpupool.core.wire.requests import Answer, ControlRequest, Found
from gpupool.data import device as devices
from gpupool.engine import process
from gpupool.engine.cells import execute
from gpupool.engine.control import answer
from gpupool.engine.group import forming
from gpupool.engine.output.recording import Recording, swap
from gpupool.engine.process import this_rank
from gpupool.engine.shell.shell import close_own_shell, plan_shell, this_shell

_NOTHING = object()


@dataclass
class _Before:
    """What `leave` puts back: name -> (what we have set, what was there)."""

    environ: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    names: dict[str, tuple[object, object]] = field(default_factory=dict)
    gpu: devices.Device | None = None
    group: object = None  # the process group that was formed here


_before: _Before | None = None


def join(rank: Rank, folder: Path) -> tuple[Rank, list[str]]:
    """Make this process rank 0 of 1.

    Args:
        rank: what `this_rank` gives from now on, but for what torch knows better here.
        folder: where files may be put.

    Returns:
        The rank as it is here, and the user's names that mean something else until `leave`.

    Raises:
        PoolError: this process has a process group already; it stays as it is.
        PlacementError: torch does not see the GPU here.
    """
    global _before
    if dist.is_initialized():
        raise PoolError(_HAS_GROUP, "group")
    before = _Before()
    device = "cpu"
    if rank.gpu is not None:
        index = _device_index(rank.gpu.uuid)
        device, before.gpu = f"cuda:{index}", devices.of("cuda")
    rank = replace(rank, device=device, num_threads=torch.get_num_threads())
    for name, value in _environment().items():
        before.environ[name] = value, os.environ.get(name)
        os.environ[name] = value
    names = execute.cell_names(rank)
    if get_ipython() is not None:
        _cover(this_shell().user_ns, names, before)
    plan_shell(folder, names)
    process.rank, _before = rank, before
    current.is_on_rank = lambda: process.publish is not None
    covered = [name for name, (ours, users) in before.names.items() if _differ(ours, users)]
    return rank, covered


def form_group(plan: forming.Plan) -> None:
    """Form the process group of this process alone; leaves the one formed here before."""
    assert _before is not None
    if dist.is_initialized() and dist.group.WORLD is not _before.group:
        raise PoolError(_HAS_GROUP, "group")
    forming.form(plan)
    _before.group = dist.group.WORLD


def leave() -> None:
    """Make this process what it was before `join`; does nothing without one."""
    global _before
    if _before is None:
        return
    before, _before = _before, None
    process.rank = None
    current.is_on_rank = bool
    if dist.is_initialized() and dist.group.WORLD is before.group:
        forming.leave()
    if before.gpu is not None:
        before.gpu.make_current()
    for name, (ours, users) in before.environ.items():
        if os.environ.get(name) == ours:
            os.environ.pop(name)
            if users is not None:
                os.environ[name] = users
    shell: Any = get_ipython()
    for name, (ours_, users_) in before.names.items():
        if shell.user_ns.get(name, _NOTHING) is ours_:
            del shell.user_ns[name]
            if users_ is not _NOTHING:
                shell.user_ns[name] = users_
    close_own_shell()


def call(call: Call[Value], hear: OnMessage | None) -> Reply[Value]:
    """Serve a call here; `hear` is called with what is shown and published meanwhile."""
    if isinstance(call, RunSource):
        this_shell()  # now, so that its displays are heard too
    outer = process.publish
    try:
        with Recording(hear) as recording, contextlib.ExitStack() as undo:
            _hear_breakpoints(undo)
            process.publish = recording.publish
            return invoke.serve(replace(call, number=None))  # the kernel's own interrupt ends it
    finally:
        process.publish = outer


def set(name: str, value: object) -> None:
    """Let a name of the cells mean this very object."""
    this_shell().user_ns[name] = value


def control(request: ControlRequest[Found]) -> Answer[Found]:
    """Do what a control request asks, here and now."""
    return answer(type(request), request.content())


def load(packed: Packed) -> Any:
    """A value that was packed here."""
    return Source(packed).load()


def keeping_random_state() -> AbstractContextManager[None]:
    """While entered, the notebook's random numbers are not used up."""
    device = torch.device(this_rank().device)
    return torch.random.fork_rng([device.index] if device.type == "cuda" else [])


# ---- inside ----------------------------------------------------------------------------------

_HAS_GROUP = (
    "this process has a process group of torch.distributed already, which an inline pool would "
    "replace. Leave it first: torch.distributed.destroy_process_group()."
)


def run_source(source: str, cell_number: int | None, waits: bool) -> Reply[CodeReply]:
    """Run a cell inside the notebook's cell that asked for it; no variable has to travel."""
    shell = this_shell()
    values: list[object] = []

    def on_value(value: object) -> None:
        """Instead of showing the value: it belongs to the result, and a view may show it."""
        if value is not None:
            values.append(value)
            data, metadata = shell.display_formatter.format(value)
            if data and process.publish is not None:
                process.publish(OutputKind.RESULT, {"data": data, "metadata": metadata})

    started = time.monotonic()
    with _inside_a_cell(shell, cell_number, on_value) as quiet:
        result = execute.run_cell(shell, source, is_cell=cell_number is not None)
    quiet.passed_over(result)
    value = values[-1] if values else None
    return execute.cell_reply(result, value, started, waits)


@contextlib.contextmanager
def _inside_a_cell(
    shell: Any, cell_number: int | None, on_value: Callable[[object], None]
) -> Iterator[execute.QuietErrors]:
    """Let `shell` run a cell while it runs one: the outer one's numbers and values stay."""
    count, hook = shell.execution_count, shell.display_trap.hook
    exec_result = shell.displayhook.exec_result
    # "Cell In[12]" in tracebacks means the notebook's, whose number has been counted up already
    shell.execution_count = cell_number or max(1, shell.displayhook.prompt_count)
    shell.display_trap.hook = on_value
    with contextlib.ExitStack() as undo:
        swap(undo, sys, "displayhook", on_value)
        # Errors are not shown here, nor noted as the last one: that will be the SpmdError.
        quiet = undo.enter_context(execute.QuietErrors(shell))
        try:
            yield quiet
        finally:
            shell.execution_count, shell.display_trap.hook = count, hook
            shell.displayhook.exec_result = exec_result


def _hear_breakpoints(undo: contextlib.ExitStack) -> None:
    """Have `breakpoint()` mean pdb until `undo` is closed, if nothing else would hear it.

    ipykernel loads debugpy, whose hook does nothing as long as no debugger's window is attached.
    """
    debugpy = sys.modules.get("debugpy")
    if str(getattr(sys.breakpointhook, "__module__", "")).startswith("debugpy.") and not (
        debugpy is not None and debugpy.is_client_connected()
    ):
        swap(undo, sys, "breakpointhook", sys.__breakpointhook__)


def _environment() -> dict[str, str]:
    """torchrun's names, and what the group reads, as an engine has them."""
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    if sys.platform == "linux":
        environment |= environ.for_groups(os.environ)
    return environment


def _cover(namespace: dict[str, Any], names: Mapping[str, object], before: _Before) -> None:
    for name, value in names.items():
        before.names[name] = value, namespace.get(name, _NOTHING)
        namespace[name] = value


def _differ(ours: object, users: object) -> bool:
    """Whether a name of the user's meant something else; `==` may be anything but a truth value."""
    if users is _NOTHING or users is ours:
        return False
    return type(users) is not type(ours) or bool(users != ours)


def _device_index(uuid: str) -> int:
    """torch's number of a GPU: it need not be the driver's."""
    gpus = list(devices.visible_gpus())
    for index, gpu in enumerate(gpus):
        if uuid.endswith(gpu.uuid):  # GPU-..., MIG-...
            return index
    raise PlacementError(
        f"GPU {uuid} is not among the {len(gpus)} that torch sees in this process. Was "
        "CUDA_VISIBLE_DEVICES changed after torch had begun to use CUDA? Restart the kernel.",
        "unknown",
        uuid,
    )
