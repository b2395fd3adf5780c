"""Random numbers of augmentation that depend on (seed, epoch, index) alone: not on ranks, threads,
or what was drawn before. Runs anywhere; torch.

A transform asks torch for random numbers, as those of torchvision do, without saying from which
generator; torch then takes one that all threads of the process share. Inside `keyed_draws` each of
torch's random functions draws from a generator of its own instead.

numpy and Python's `random` cannot be led aside so: their functions belong to generators that all
threads share. `seeded` sets them, where nothing else draws meanwhile.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gpupool.data.reading.samples import Draw

# Those that take a generator.
_FUNCTIONS = "rand randn randint randperm normal bernoulli multinomial poisson binomial"
_FUNCTIONS += " _sample_dirichlet _standard_gamma"
_METHODS = "bernoulli multinomial bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_"
_METHODS += " random_ uniform_"
_RANDOM: list[Callable[..., Any]] = [
    *(getattr(torch, name) for name in _FUNCTIONS.split()),
    *(getattr(Tensor, name) for name in _METHODS.split()),
]
# Those that take none, and what does the same in place with one.
_LIKE: dict[Callable[..., Any], Callable[..., Tensor]] = {
    torch.rand_like: Tensor.uniform_,
    torch.randn_like: Tensor.normal_,
    torch.randint_like: Tensor.random_,
}
_KEYED = frozenset([*_RANDOM, *_LIKE])


def keyed_draws(draw: Draw | None, index: int) -> AbstractContextManager[object]:
    """Inside, what this thread draws from torch depends on `draw` and `index` alone.

    Keyed are torch.rand, randn, randint, randperm, normal, bernoulli, multinomial, poisson and
    binomial, those with `_like`, and the methods that fill a tensor (`uniform_`, `normal_`, ...),
    unless they are given a generator: all that torchvision's transforms draw from. Not keyed are
    dropout and other layers of a network. `None` keys nothing.
    """
    return nullcontext() if draw is None else _Keyed(draw.key(index))


def seeded(draw: Draw | None, index: int) -> AbstractContextManager[object]:
    """As `keyed_draws`; the generators of numpy and Python's `random` are seeded, and stay so."""
    if draw is None:
        return nullcontext()
    key = draw.key(index)
    random.seed(key)
    np.random.seed(key % 2**32)
    return _Keyed(key)


def generators() -> bytes:
    """The state of the generators of numpy and Python's `random`."""
    return pickle.dumps((random.getstate(), np.random.get_state(legacy=False)))


def restore(state: bytes) -> None:
    python, numpy = pickle.loads(state)  # nosec B301 # made in this process
    random.setstate(python)
    np.random.set_state(numpy)


class _Keyed(TorchFunctionMode):
    """Gives torch's random functions a generator; modes belong to the thread that enters them."""

    def __init__(self, key: int) -> None:
        super().__init__()
        self._key = key
        self._generators: dict[torch.device, torch.Generator] = {}

    @property
    def has_drawn(self) -> bool:
        return bool(self._generators)

    # Every use of torch inside passes through here, so it does no more than it must.
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _KEYED:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if func in _LIKE:
            return self._like(func, *args, **kwargs)
        kwargs["generator"] = self._generator(self._device(args, kwargs))
        return func(*args, **kwargs)

    def _like(self, func: Any, like: Tensor, *bounds: int, **kwargs: Any) -> Tensor:
        kwargs.pop("generator", None)
        names = [name for name in ("low", "high") if name in kwargs]
        limits = [*bounds, *(kwargs.pop(name) for name in names)]
        if func is torch.randint_like and len(limits) == 1:
            limits.insert(0, 0)
        empty = torch.empty_like(like, **kwargs)
        return _LIKE[func](empty, *limits, generator=self._generator(empty.device))

    def _device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
        """Where a random function puts its numbers."""
        if kwargs.get("device") is not None:
            return torch.device(kwargs["device"])
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                return value.device
        return torch.get_default_device()

    def _generator(self, device: torch.device) -> torch.Generator:
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device).manual_seed(self._key)
        return generator
