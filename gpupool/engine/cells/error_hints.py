"""What follows from some errors: a lack of memory, and a GPU whose context is lost. On engines."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from types import FrameType

import torch

from gpupool.data import device as devices
from gpupool.engine.cells import debug

_HOST_ALLOCATOR = "DefaultCPUAllocator: "
_NOT_KEPT = (
    "The last error here was a lack of memory. Its frames are not kept: they would hold tensors."
)
CONTEXT_LOST = (
    "The GPU context of this rank is lost: nothing on its GPU works in this process any more. CUDA "
    "reports such an error late, so it may come from an earlier line: `import os; "
    'os.environ["CUDA_LAUNCH_BLOCKING"] = "1"`, `%gpupool env CUDA_LAUNCH_BLOCKING` and '
    "`%gpupool restart` have the next one name its own line."
)


def memory_is_out(error: BaseException) -> bool:
    """Whether an error, or what it was raised `from`, is a lack of memory, of a GPU or of the host.

    Not one that was caught before: what was raised then is another error.
    """
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and not any(current is one for one in seen):
        is_hosts = isinstance(current, MemoryError) or _HOST_ALLOCATOR in _text(current)
        if is_hosts or isinstance(current, torch.OutOfMemoryError):
            return True
        seen.append(current)
        current = current.__cause__
    return False


def release(frames: Sequence[FrameType]) -> None:
    """Give back the memory that only an error's frames hold, and what torch keeps for later.

    The debugger has nothing to look at then.
    """
    debug.forget(_NOT_KEPT)
    for frame in frames:
        with contextlib.suppress(RuntimeError):  # it still runs
            frame.clear()
            # Python 3.11 keeps a copy of the variables once these were asked for; this renews it
            _ = frame.f_locals
    gc.collect()
    if gpu := devices.gpu_in_use():
        gpu.free_cache()


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


def _is_of_cuda(error: BaseException) -> bool:
    kind = getattr(torch, "AcceleratorError", ())
    is_cudas = isinstance(error, RuntimeError) and "cuda" in _text(error).lower()  # NCCL: "cuda"
    is_of_cuda = isinstance(error, kind) or is_cudas
    return is_of_cuda and not isinstance(error, torch.OutOfMemoryError)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # a class of the user's, which may do anything
        return ""
