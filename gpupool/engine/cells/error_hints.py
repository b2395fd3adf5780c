"""What an error's own message does not say: what fills the memory, and what helps. Runs on engines.

Five causes are known: memory of a GPU has run out, memory of the host has, the GPU's context is
lost, after which nothing on the GPU works in this process, the GPU is another process's alone, and
RPC was begun again.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import psutil
import torch

from gpupool.core.machine import cgroup
from gpupool.core.machine.nvml import read_gpus
from gpupool.core.machine.topology import Gpu
from gpupool.data import device as devices
from gpupool.data.device import Cuda
from gpupool.engine.cells import debug
from gpupool.engine.cells.largest_tensors import largest
from gpupool.engine.shell.shell import this_shell

_MIB, _GIB = 1 << 20, 1 << 30
_MUCH = 64 * _MIB  # that an error before held: worth another try
_HOST_ALLOCATOR = "DefaultCPUAllocator: "
_NOT_KEPT = (
    "The last error here was a lack of memory. Its frames are not kept: they would hold tensors."
)
_LOST = (
    "The GPU context of this rank is lost: nothing on its GPU works in this process any more. CUDA "
    "reports such an error late, so it may come from an earlier line: `import os; "
    'os.environ["CUDA_LAUNCH_BLOCKING"] = "1"`, `%gpupool env CUDA_LAUNCH_BLOCKING` and '
    "`%gpupool restart` have the next one name its own line."
)

_BUSY = "busy or unavailable"  # cudaErrorDevicesUnavailable
_STALE_RPC = "but RPC is no longer running on this node"
_RPC = (
    "torch passes references (RRef) on in the first RPC of a process alone, and this rank has "
    "begun another one since. `%gpupool restart` gives new processes."
)


def memory_is_out(error: BaseException) -> bool:
    """Whether an error, or what it was raised `from`, is a lack of memory, of a GPU or of the host.

    Not one that was caught before: what was raised then is another error.
    """
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and not any(current is one for one in seen):
        if _is_gpu_memory(current) or _is_host_memory(current):
            return True
        seen.append(current)
        current = current.__cause__
    return False


def hint(chain: Sequence[BaseException]) -> str:
    """What is to be reported besides the messages of an error and of those behind it, or ""."""
    try:
        for error in chain:
            if _is_gpu_memory(error) and (gpu := devices.gpu_in_use()):
                return _of_gpu_memory(gpu, chain)
            if _is_host_memory(error):
                return _of_host_memory(chain)
        if any(_STALE_RPC in _text(error) for error in chain):
            return _RPC
        if any(_BUSY in _text(error) for error in chain):
            return _of_busy_gpu()
        return _LOST if is_context_lost(*chain) else ""
    except Exception:  # a hint must not take the error's place
        return ""


def is_context_lost(*errors: BaseException) -> bool:
    """Whether one of these came from CUDA and the GPU can be used no more in this process."""
    if not any(map(_is_of_cuda, errors)):
        return False
    try:
        # Asked, not waited for: another rank may be late in a collective that is under way.
        if gpu := devices.gpu_in_use():
            gpu.is_done()
    except RuntimeError:
        return True
    return False


def release(frames: Sequence[FrameType]) -> None:
    """Give back the memory that only an error's frames hold, and what torch keeps for later.

    The debugger has nothing to look at then.
    """
    debug.forget(_NOT_KEPT)
    _clear(frames)
    if gpu := devices.gpu_in_use():
        gpu.free_cache()


def _release_earlier(chain: Sequence[BaseException]) -> None:
    """Give back what the frames of the error before hold; those of `chain` are still needed."""
    needed = [frame for error in chain for frame, _ in traceback.walk_tb(error.__traceback__)]
    earlier = [frame for frame in debug.frames() if frame not in needed]
    debug.forget(_NOT_KEPT)
    _clear(earlier)


def _clear(frames: Iterable[FrameType]) -> None:
    for frame in frames:
        with contextlib.suppress(RuntimeError):  # it still runs
            frame.clear()
            # Python 3.11 keeps a copy of the variables once these were asked for; this renews it
            _ = frame.f_locals
    gc.collect()


def _is_gpu_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError)


def _is_host_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or _HOST_ALLOCATOR in _text(error)


def _is_of_cuda(error: BaseException) -> bool:
    kind = getattr(torch, "AcceleratorError", ())
    is_cudas = isinstance(error, RuntimeError) and "cuda" in _text(error).lower()  # NCCL: "cuda"
    return (isinstance(error, kind) or is_cudas) and not _is_gpu_memory(error)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # a class of the user's, which may do anything
        return ""


def _spaces(chain: Sequence[BaseException]) -> list[Mapping[str, Any]]:
    """Where tensors have names: in the cells, and in the functions that have failed."""
    cells = this_shell().user_ns
    return [cells, *(space for error in chain for space in _locals(error) if space is not cells)]


def _locals(error: BaseException) -> Iterator[Mapping[str, Any]]:
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield {f"{name} in {frame.f_code.co_name}()": v for name, v in frame.f_locals.items()}


# ---- memory ----------------------------------------------------------------------------------


def _of_gpu_memory(gpu: Cuda, chain: Sequence[BaseException]) -> str:
    before = gpu.memory().allocated
    _release_earlier(chain)
    free, total, allocated, reserved = gpu.memory()
    lines = [
        f"GPU memory: {_gib(free)} of {_gib(total)} GiB free; tensors of this rank hold "
        f"{_gib(allocated)} GiB, and torch keeps {_gib(reserved - allocated)} GiB for later ones."
    ]
    lines += _released(before - allocated)
    lines += _others([one for one in read_gpus()[0] if one.uuid.endswith(gpu.uuid)])
    lines += _listed(gpu.device, _spaces(chain), allocated)
    return "\n".join(lines)


def _released(num_bytes: int) -> list[str]:
    """What the error before held, if it may have been too much."""
    if num_bytes < _MUCH:
        return []
    return [
        f"The frames of the error before this one, kept for the debugger, held {_gib(num_bytes)} "
        "GiB more. They are released now: run the cell again."
    ]


def _others(gpus: list[Gpu]) -> list[str]:
    """Who else holds memory of a GPU."""
    holders = [
        f"{process.name} {process.pid} ({process.user}, {_used(process.used_memory_bytes)})"
        for gpu in gpus
        for process in gpu.processes
        if process.pid != os.getpid()
    ]
    return [f"Also on this GPU: {', '.join(holders)}."] if holders else []


def _of_busy_gpu() -> str:
    """Why no context can be had on this rank's GPU, as far as the driver says it."""
    own = [gpu for gpu in read_gpus()[0] if gpu.uuid == os.environ.get("CUDA_VISIBLE_DEVICES")]
    if not any(gpu.is_exclusive for gpu in own):
        return "\n".join(_others(own))
    mode = "The compute mode of this GPU is EXCLUSIVE_PROCESS: one process at a time can use it."
    return "\n".join([mode, *_others(own)])


def _of_host_memory(chain: Sequence[BaseException]) -> str:
    before = psutil.Process().memory_info().rss
    _release_earlier(chain)
    machine, used = psutil.virtual_memory(), psutil.Process().memory_info().rss
    facts = [
        f"{_gib(machine.available)} of {_gib(machine.total)} GiB of this machine are available"
    ]
    limit = cgroup.memory_limit()
    if limit:
        facts.append(f"the limit of its cgroup is {_gib(limit)} GiB")
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        facts.append(f"its own limit (RLIMIT_AS) is {_gib(address_space)} GiB")
    head = f"Host memory: this rank holds {_gib(used)} GiB; {', '.join(facts)}."
    listed = _listed(torch.device("cpu"), _spaces(chain))
    return "\n".join([head, *_released(before - used), *listed])


def _listed(device: torch.device, spaces: list[Mapping[str, Any]], allocated: int = 0) -> list[str]:
    """The largest tensors, one a line."""
    found = [held for held in largest(device, spaces) if held.num_bytes >= _MIB]
    if not found:
        return []
    lines = ["Its largest tensors:", *(f"  {held}" for held in found)]
    rest = allocated - sum(held.num_bytes for held in found)
    if rest > allocated / 10:
        others = f"{rest / _MIB:,.1f} MiB"
        lines.append(f"  {others}  in others; what backward() needs of a model has no name")
    return lines


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f}"


def _used(num_bytes: int | None) -> str:
    return "? MiB" if num_bytes is None else f"{num_bytes / _MIB:,.0f} MiB"
