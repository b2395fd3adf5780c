"""Which images of a datastore cannot be used, found by reading all of them. Runs anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from gpupool.core.errors import SampleError
from gpupool.core.progress import OnProgress, progress_to
from gpupool.data.reading.samples import Samples, read_samples

_CHUNK = 256  # samples read at once: bounds what an interrupt has to cancel
_SHOWN = 50


class Labelled(Samples, Protocol):
    """What is checked and looked at: samples that have names and labels."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """The index of the class of each."""

    def num_bytes(self, index: int) -> int:
        """Its size, as listed."""

    def name(self, index: int) -> str:
        """The URL of a sample."""

    def label(self, index: int) -> str:
        """The name of its class."""


@dataclass(frozen=True, slots=True)
class BadSample:
    """One image that cannot be used: its place in the datastore, class, size as listed, and the
    `reason` of its SampleError ("missing", "damaged" ...), of which `detail` says more.
    """

    index: int
    url: str
    label: str
    num_bytes: int
    reason: str
    detail: str


class CheckResult(tuple[BadSample, ...]):
    """The images that cannot be used, of `num_checked` that were read; shows as a table."""

    HEADER = ("image", "class", "bytes", "reason", "what is wrong")
    num_checked: int

    def __new__(cls, bad: Iterable[BadSample] = (), num_checked: int = 0) -> CheckResult:
        result = super().__new__(cls, bad)
        result.num_checked = num_checked
        return result

    @property
    def good(self) -> NDArray[np.bool_]:
        """For each image whether nothing is wrong with it, as `ds.subset` takes it."""
        good = np.ones(self.num_checked, bool)
        good[[bad.index for bad in self]] = False
        return good

    @property
    def summary(self) -> str:
        """One sentence: how many were read, how many are bad, and how."""
        reasons = [bad.reason for bad in self]
        if not reasons:
            return f"All {self.num_checked:,} images can be read."
        kinds = sorted(set(reasons), key=lambda kind: (-reasons.count(kind), kind))
        counted = ", ".join(f"{reasons.count(kind):,} {kind}" for kind in kinds)
        return f"{len(reasons):,} of {self.num_checked:,} images cannot be used: {counted}."

    def shown(self) -> tuple[str, Sequence[tuple[str, ...]]]:
        """What a view shows: the summary, and as many rows, as `HEADER` says, as fit."""
        more = f" The first {_SHOWN}:" if len(self) > _SHOWN else ""
        rows = [(b.url, b.label, f"{b.num_bytes:,}", b.reason, b.detail) for b in self[:_SHOWN]]
        return self.summary + more, rows

    def __repr__(self) -> str:
        summary, rows = self.shown()
        lines = [self.HEADER, *rows] if rows else []
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join([summary, *("  ".join(map(str.ljust, n, widths)).rstrip() for n in lines)])


def check(dataset: Labelled, on_progress: OnProgress | None = None) -> CheckResult:
    """Read and decode every sample once, many at a time; see `Datastore.check`."""
    total, bad = len(dataset), list[BadSample]()
    with progress_to(on_progress, "Checking", total, "images") as report:
        for place, error in enumerate(tried(dataset, range(total), lambda place, image: None)):
            if error is not None:
                # The table has a column for the URL.
                detail = str(error).removeprefix(error.url).strip()
                name, label = dataset.name(place), dataset.label(place)
                num_bytes = dataset.num_bytes(place)
                bad.append(BadSample(place, name, label, num_bytes, error.reason, detail))
            report(place + 1, total)
    return CheckResult(bad, total)


def tried(
    dataset: Samples, places: Sequence[int], make: Callable[[int, Any], Any]
) -> Iterator[Any | SampleError]:
    """For each place, in order, what `make(place, input)` gives, or why it cannot be read."""
    reading = cast(Samples, _Tried(dataset, make))
    for start in range(0, len(places), _CHUNK):
        yield from read_samples(reading, places[start : start + _CHUNK])


@dataclass(frozen=True)
class _Tried:
    """A data set as `read_samples` reads it: an error is a sample, too."""

    dataset: Samples
    make: Callable[[int, Any], Any]

    def fetch(self, place: int) -> Any:
        try:
            return self.dataset.fetch(place)
        except SampleError as error:
            return error

    def decode(self, place: int, fetched: Any, draw: None) -> Any:
        if isinstance(fetched, SampleError):
            return fetched
        try:
            return self.make(place, self.dataset.decode(place, fetched, draw)[0])
        except SampleError as error:
            return error
