"""A copy of a state on the CPU, made fast: buffers are used again. Runs on engines; knows torch."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gpupool.data import device as devices
from gpupool.data.device import Mark
from gpupool.engine.checkpoint.weights import same_kind


class Snapshot:
    """Copies nested dicts, lists and tuples, and what is in them.

    One copy at a time: the next `take` overwrites it. Tensors of a GPU are copied into pinned
    memory, in the order of its stream: later kernels wait for the copy, and the caller does not.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._marks: list[Mark] = []

    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state with copies of its tensors, which are whole after `wait`."""
        sources: list[Tensor] = []
        _collect(state, sources)
        fitting = len(sources) == len(self._buffers) and all(
            _fits(*pair) for pair in zip(sources, self._buffers, strict=True)
        )
        if not fitting:
            self._buffers = [devices.of(one.device).host_buffer(one) for one in sources]
        if sources:
            # One call for all: hundreds of small copies would each cost a launch.
            with torch.no_grad():
                torch._foreach_copy_(self._buffers, sources, non_blocking=True)
        # What `wait` waits for: the copies, and not what the stream is given afterwards.
        self._marks = [devices.of(device).mark() for device in {one.device for one in sources}]
        copies = iter(self._buffers)
        return {key: _replaced(value, copies) for key, value in state.items()}

    def wait(self) -> None:
        """Wait until the copies are whole."""
        for mark in self._marks:
            mark.synchronize()


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value.detach())
    elif isinstance(value, Mapping):
        for one in value.values():
            _collect(one, found)
    elif isinstance(value, (list, tuple)):
        for one in value:
            _collect(one, found)


def _replaced(value: Any, copies: Any) -> Any:
    """The same nest as `torch.load` would read it, with the copies in order of `_collect`."""
    if isinstance(value, Tensor):
        return next(copies)
    if isinstance(value, Mapping):
        nest = {key: _replaced(one, copies) for key, one in value.items()}
        return same_kind(value, nest) if isinstance(value, OrderedDict) else nest
    if isinstance(value, list):
        return [_replaced(one, copies) for one in value]
    if isinstance(value, tuple):  # also a named one, which `torch.load` would not read
        return tuple(_replaced(one, copies) for one in value)
    return copy.deepcopy(value)


def _fits(source: Tensor, buffer: Tensor) -> bool:
    return (
        source.shape == buffer.shape
        and source.dtype == buffer.dtype
        and source.stride() == buffer.stride()  # channels_last would be copied element by element
    )
