"""A forward pass: its random numbers, its precision, what it changes; and whether it is the same to
the last bit each time. Runs on engines."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from gpupool.data import device as devices
from gpupool.data.reading.samples import key_of

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class ForwardState:
    """The buffers of a network. A forward pass may change them, or put others in their place."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module, name)
            for module in model.modules()
            for name, _ in module.named_buffers(recurse=False)
        ]
        self._buffers: list[Tensor] = []
        self._saved: list[Tensor] = []
        self._is_known = False

    def save(self) -> None:
        buffers = [getattr(module, name) for module, name in self._places]
        # The memory of the last copy serves again, unless a buffer was replaced.
        if not self._buffers or not all(map(operator.is_, buffers, self._buffers)):
            self._saved = [torch.empty_like(buffer) for buffer in buffers]
        self._buffers = buffers
        _copy_to(self._saved, buffers)
        self._is_known = True

    def forget(self) -> None:
        """What was changed since then is to stay."""
        self._is_known = False

    def restore(self) -> None:
        if not self._is_known:
            return
        _copy_to(self._buffers, self._saved)
        for (module, name), buffer in zip(self._places, self._buffers, strict=True):
            setattr(module, name, buffer)


def _copy_to(places: list[Tensor], values: list[Tensor]) -> None:
    # Of several number formats at once, a GPU would copy each tensor on its own.
    with torch.no_grad():
        for kind in {place.dtype for place in places}:
            pairs = [p for p in zip(places, values, strict=True) if p[0].dtype == kind]
            torch._foreach_copy_([place for place, _ in pairs], [value for _, value in pairs])


def seed_step(seed: int, rank: int, step: int, device: torch.device) -> None:
    # Not `torch.manual_seed`, which seeds all devices of the machine.
    key = step_key(seed, rank, step)
    torch.default_generator.manual_seed(key)
    devices.of(device).seed(key)


def step_key(seed: int, rank: int, step: int) -> int:
    """64 bits. The lower half is as good: torch's generator of the CPU takes no more."""
    return key_of(seed, rank, step, what=b"step")


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Inside, networks compute mixed in "bf16" or "fp16"; in "float32", as they are."""
    if precision not in _DTYPES:
        return nullcontext()
    return torch.autocast(device.type, _DTYPES[precision])


@contextmanager
def deterministic(is_asked: bool) -> Iterator[None]:
    """While this lasts, torch computes the same from the same numbers, or raises RuntimeError.

    A CPU does in any case; on a GPU some kernels add in the order in which threads come. cuBLAS
    reads CUBLAS_WORKSPACE_CONFIG once: each engine with a GPU has it from the start, by
    `engine_environment` in pool/launchers/processes.py, which costs some MiB and no time.
    """
    cudnn = torch.backends.cudnn
    was = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings = cudnn.deterministic, cudnn.benchmark
    try:
        if is_asked:
            torch.use_deterministic_algorithms(True)
            cudnn.deterministic, cudnn.benchmark = True, False
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned_only)
        cudnn.deterministic, cudnn.benchmark = settings
