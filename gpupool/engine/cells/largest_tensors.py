"""Which tensors of this process are large, and what the user calls them. Runs on engines."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_MAX_ITEMS = 1000  # of a list or dict that are looked at
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Held:
    """Memory that one or more tensors share, as the largest of these; `name` may be ""."""

    name: str
    kind: str
    values: str
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.num_bytes / _MIB:,.1f} MiB  {self.name or self.kind}  {self.values}"


def largest(
    device: torch.device, spaces: Sequence[Mapping[str, Any]], number: int = 5
) -> list[Held]:
    """The largest pieces of memory that tensors hold on a device, the largest first.

    Args:
        spaces: names -> values, in which tensors are looked for, also in models, optimizers, lists
            and dicts. The first name that is found counts.
    """
    names = dict[int, str]()
    for space in spaces:
        for name, tensor in _named(space):
            with contextlib.suppress(Exception):  # of a kind that has no storage
                names.setdefault(_address(tensor), name)
    pieces = dict[int, Tensor]()
    for tensor in _tensors(device):
        with contextlib.suppress(Exception):
            known = pieces.setdefault(_address(tensor), tensor)
            if tensor.numel() > known.numel():
                pieces[_address(tensor)] = tensor
    sizes = {address: pieces[address].untyped_storage().nbytes() for address in pieces}
    first = sorted(pieces, key=lambda address: -sizes[address])[:number]
    return [_held(pieces[a], names.get(a, ""), sizes[a]) for a in first if sizes[a]]


def _held(tensor: Tensor, name: str, num_bytes: int) -> Held:
    kind = type(tensor).__name__
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Held(name, kind, f"{dtype}[{', '.join(map(str, tensor.shape))}]", num_bytes)


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _tensors(device: torch.device) -> Iterator[Tensor]:
    """Every tensor on a device that Python knows of, gradients too."""
    for thing in gc.get_objects():
        if not issubclass(type(thing), Tensor):  # `isinstance` would ask proxies for their class
            continue
        with contextlib.suppress(Exception):
            if _is_on(thing, device):
                yield thing
                if thing.is_leaf and thing.grad is not None:
                    yield thing.grad


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def _named(space: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a namespace; IPython's own names (`_`, `_3`) last."""
    for name in sorted(space, key=lambda name: name.startswith("_")):
        with contextlib.suppress(Exception):
            yield from _inside(name, space[name])


def _inside(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    if issubclass(type(value), Tensor):
        yield name, value
        if value.is_leaf and value.grad is not None:
            yield f"{name}.grad", value.grad
    elif isinstance(value, nn.Module):
        for part in (value.named_parameters(), value.named_buffers()):
            for inner, tensor in part:
                yield from _inside(f"{name}.{inner}", tensor, depth + 1)
    elif isinstance(value, torch.optim.Optimizer):
        for number, state in enumerate(value.state.values()):
            yield from _inside(f"{name}.state[{number}]", state, depth + 1)
    elif isinstance(value, dict) and depth < 2:
        for key, item in list(value.items())[:_MAX_ITEMS]:
            yield from _inside(f"{name}[{key!r}]", item, depth + 1)
    elif isinstance(value, (list, tuple)) and depth < 2:
        for number, item in enumerate(value[:_MAX_ITEMS]):
            yield from _inside(f"{name}[{number}]", item, depth + 1)
