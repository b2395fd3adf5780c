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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a lack of memory, of a GPU or of the host."""
    is_hosts = isinstance(error, MemoryError) or _HOST_ALLOCATOR in text_of(error)
    return is_hosts or isinstance(error, torch.OutOfMemoryError)


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
    is_cudas = isinstance(error, RuntimeError) and "cuda" in text_of(error).lower()  # NCCL: "cuda"
    is_of_cuda = isinstance(error, kind) or is_cudas
    return is_of_cuda and not isinstance(error, torch.OutOfMemoryError)


def text_of(error: BaseException) -> str:
    """The message of an error."""
    try:
        return str(error)
    except BaseException as failure:  # a class of the user's, which may do anything
        return f"<no message: its __str__ raised {type(failure).__name__}>"
