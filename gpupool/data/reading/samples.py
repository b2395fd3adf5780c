"""What a data set of ours gives the loader: samples in two parts, so that waiting and computing
overlap, and their normalization. Runs anywhere; no torch at import.

    class Photos:                             # a `Samples`
        def __len__(self): ...
        def fetch(self, index): ...           # waits for the network
        def decode(self, index, fetched, draw): ...   # computes
"""

from __future__ import annotations

import hashlib
import math
import operator
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

from gpupool.core.errors import OptionsError, SampleError
from gpupool.data.stores.threads import in_threads

NUM_FETCH_THREADS = 64


@dataclass(frozen=True, slots=True)
class Draw:
    """Which random numbers augmentation draws in an epoch of a training; the rest says the index of
    the sample. See `gpupool.data.reading.augmentation`."""

    seed: int
    epoch: int

    def key(self, index: int) -> int:
        """As good as independent of those of other samples and epochs: `key_of`.

        >>> Draw(0, 1).key(7) == Draw(0, 1).key(7) != Draw(0, 2).key(7)
        True
        """
        return key_of(self.seed, self.epoch, index)


def key_of(*numbers: int, what: bytes = b"") -> int:
    """A number in 0..2**64-1 that these three alone determine; another one for each `what`."""
    # Modulo, because a seed may be negative, or larger.
    packed = struct.pack("<3Q", *(int(number) % 2**64 for number in numbers))
    hashed = hashlib.blake2b(packed, digest_size=8, person=what)
    return int.from_bytes(hashed.digest(), "little")


def numbered(draw: Draw | None, number: int) -> Draw | None:
    """What keys the same index for the `number`th time, or in the `number`th part of a whole."""
    return Draw(draw.key(number), draw.epoch) if draw and number else draw


class Skipped(NamedTuple):
    """A sample that was left out: its URL, and the `reason` of its SampleError."""

    url: str
    reason: str

    @classmethod
    def of(cls, error: SampleError) -> Self:
        return cls(error.url or str(error), error.reason)


@runtime_checkable
class Samples(Protocol):
    """A data set of pairs (input, target) that are read in two parts; see the module.

    Both raise SampleError if this sample cannot be read but others can, and are called by several
    threads at once. It may also have `epoch_order(seed, epoch, batch_size) -> Indices`, a
    permutation of its indices that is the same for every number of ranks: in which order its epochs
    go best.
    """

    def __len__(self) -> int: ...

    def fetch(self, index: int) -> Any:
        """What has to be waited for, such as the bytes of a file."""

    def decode(self, index: int, fetched: Any, draw: Draw | None) -> tuple[Any, Any]:
        """The pair (input, target) from what `fetch` gave; computes.

        `draw` keys the random numbers of augmentation; None: drawn from torch's own generator.
        """


class InParts:
    """A `Samples` as a map-style dataset."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """One sample. Raises IndexError beyond the end, SampleError if it cannot be read."""
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """The samples of a batch, in order, as torch's DataLoader asks for them; many at a time."""
        dataset: Any = self
        if len(indices) == 1:
            (place,) = indices
            return [dataset.decode(place, dataset.fetch(place), None)]
        samples = []
        for sample in tried(indices, dataset.fetch, partial(dataset.decode, draw=None)):
            if isinstance(sample, SampleError):
                raise sample
            samples.append(sample)
        return samples


def tried(
    places: Sequence[int], fetch: Callable[[int], Any], make: Callable[[int, Any], Any]
) -> Iterator[Any | SampleError]:
    """For each place, in order, what `make(place, fetch(place))` gives, or why it cannot be read.

    Many are fetched at once, and made on as many cores as this process has.
    """
    import torch

    permits = threading.BoundedSemaphore(torch.get_num_threads())

    def read(place: int) -> Any:
        try:
            fetched = fetch(place)
            with permits:
                return make(place, fetched)
        except SampleError as error:
            return error

    yield from in_threads(read, places, min(NUM_FETCH_THREADS, len(places)))


def apply_transform(transform: Callable[..., Any], name: str, *images: Any) -> Any:
    """`transform(*images)`; what it raises gets a note that says with which image: `name`."""
    try:
        return transform(*images)
    except Exception as error:
        error.add_note(f"The transform raised this for {name}")
        raise


class Normalization(NamedTuple):
    """What becomes of images in 0..1: (image - mean) / std, per channel; 1 or 3 numbers each."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(
        cls, mean: float | Sequence[float] | None, std: float | Sequence[float] | None
    ) -> Normalization | None:
        """What a user gave; None for None. Raises OptionsError for what makes no sense."""
        if mean is None and std is None:
            return None
        if mean is None or std is None:
            raise OptionsError("with_normalization needs both mean and std, or None alone")
        means, stds = _numbers("mean", mean), _numbers("std", std)
        if not all(0 <= value <= 1 for value in means) or not all(0 < value <= 1 for value in stds):
            raise OptionsError(
                f"mean={means} and std={stds} are for images in 0..1: a mean is in 0..1, a std "
                "above 0 and at most 1; divide those for 0..255 by 255"
            )
        size = max(len(means), len(stds))
        return cls(means * (size // len(means)), stds * (size // len(stds)))


def _numbers(name: str, value: float | Sequence[float]) -> tuple[float, ...]:
    try:
        given = [value] if isinstance(value, (int, float)) else list(value)
        numbers = tuple(map(float, given))
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) not in (1, 3) or not all(map(math.isfinite, numbers)):
        raise OptionsError(f"{name}={value!r} must be a number, or three: one for each channel")
    return numbers
