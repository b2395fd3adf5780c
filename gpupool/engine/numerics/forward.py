"""A forward pass: its random numbers, its precision, and what it changes. Runs on engines."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from gpupool.data import device as devices
from gpupool.data.reading.samples import key_of

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class ForwardState:
    """The buffers of a network, which a forward pass may change.

    It may change one, or put another tensor in its place: `self.mean = 0.9 * self.mean`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module, name)
            for module in model.modules()
            for name, _ in module.named_buffers(recurse=False)
        ]
        self._buffers: list[Tensor] = []
        self._saved: list[Tensor] = []

    def save(self) -> None:
        """Keep a copy of what it is now, on its device, in the place of the one before."""
        buffers = [getattr(module, name) for module, name in self._places]
        # The memory of the last copy serves again, unless a buffer was replaced.
        if not self._buffers or not all(map(operator.is_, buffers, self._buffers)):
            self._saved = [torch.empty_like(buffer) for buffer in buffers]
        self._buffers = buffers
        _copy_to(self._saved, buffers)

    def restore(self) -> None:
        """Make it what was saved last."""
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
    """Set torch's generators, of the CPU and of `device`, to what (seed, rank, step) say.

    So a resumed training draws what it would have drawn without the interruption.
    """
    # Not `torch.manual_seed`, which seeds all devices of the machine.
    key = step_key(seed, rank, step)
    torch.default_generator.manual_seed(key)
    devices.of(device).seed(key)


def step_key(seed: int, rank: int, step: int) -> int:
    """A number in 0..2**64-1 that these alone determine.

    Its lower half is as good: torch's generator of the CPU takes no more.
    """
    return key_of(seed, rank, step, what=b"step")


@contextmanager
def evaluating(norms: Sequence[nn.Module], *, only_single: bool) -> Iterator[None]:
    """While this lasts, these batch norms are in evaluation mode.

    With `only_single` those alone that get one value a channel, which has no variance: torch
    refuses to train them on it.
    """
    norms = [norm for norm in norms if norm.training]
    hooks = [norm.register_forward_pre_hook(_evaluate_single) for norm in norms if only_single]
    for norm in norms:
        norm.training = only_single
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for norm in norms:
            norm.training = True


def _evaluate_single(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    if inputs[0].numel() == inputs[0].shape[1]:
        module.training = False


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Inside, networks compute mixed in "bf16" or "fp16"; in "float32", as they are."""
    if precision not in _DTYPES:
        return nullcontext()
    return torch.autocast(device.type, _DTYPES[precision])
