"""Which images of a datastore cannot be used, found by reading all of them. Runs anywhere."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpupool.core.errors import SampleError
from gpupool.core.progress import OnProgress, progress_to
from gpupool.data.reading.samples import NUM_FETCH_THREADS, Samples
from gpupool.data.stores.threads import reading_threads

_CHUNK = 512  # samples handed to the threads at once: bounds what an interrupt has to cancel
_SHOWN = 50


class Labelled(Samples, Protocol):
    """What is checked: samples that have names and labels."""

    def num_bytes(self, index: int) -> int: ...

    @property
    def manifest(self) -> Any:
        """Which samples there are."""


@dataclass(frozen=True, slots=True)
class BadSample:
    """One image that cannot be used.

    `index` is its place in the datastore, `label` its class, `num_bytes` its size as listed,
    `reason` is that of its SampleError: "missing", "damaged" ...; `detail` says more.
    """

    index: int
    url: str
    label: str
    num_bytes: int
    reason: str
    detail: str


class CheckResult(tuple[BadSample, ...]):
    """The images that cannot be used; shows as a table. Empty if all are good.

    `num_checked` is how many were read.
    """

    HEADER = ("image", "class", "bytes", "reason", "what is wrong")
    num_checked: int

    # A tuple is complete after `__new__`, so `num_checked` is set on the finished object.
    def __new__(cls, bad: Iterable[BadSample] = (), num_checked: int = 0) -> CheckResult:
        result = super().__new__(cls, bad)
        result.num_checked = num_checked
        return result

    @property
    def good(self) -> NDArray[np.bool_]:
        """For each image whether nothing is wrong with it; shape (num_checked,).

        `ds.subset(result.good)` leaves the others out.
        """
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

    def rows(self) -> list[tuple[str, ...]]:
        """One tuple of texts for each bad image, in the order of `HEADER`."""
        return [(b.url, b.label, f"{b.num_bytes:,}", b.reason, b.detail) for b in self]

    def shown(self) -> tuple[str, list[tuple[str, ...]]]:
        """What a view shows: the summary, and as many rows as can be looked at."""
        more = f" The first {_SHOWN}:" if len(self) > _SHOWN else ""
        return self.summary + more, self.rows()[:_SHOWN]

    def __repr__(self) -> str:
        summary, rows = self.shown()
        return "\n".join([summary, *(_aligned([self.HEADER, *rows]) if rows else [])])

    # pickle would call the class with the tuple alone, and lose `num_checked`.
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (tuple(self), self.num_checked)


def check(dataset: Labelled, on_progress: OnProgress | None = None) -> CheckResult:
    """Read and decode every sample once, many at a time; see `Datastore.check`."""
    total = len(dataset)
    found: list[BadSample] = []
    with progress_to(on_progress, "Checking", total, "images") as report:
        for done, bad in enumerate(_tried(dataset), start=1):
            found += [bad] if bad is not None else []
            report(done, total)
    return CheckResult(found, total)


def _tried(dataset: Labelled) -> Iterator[BadSample | None]:
    """For each sample in order None, or what is wrong with it."""
    import torch

    # Many threads wait for the store; only as many decode as the process has cores.
    permits = threading.BoundedSemaphore(torch.get_num_threads())

    def read(place: int) -> BadSample | None:
        try:
            fetched = dataset.fetch(place)
            with permits:
                dataset.decode(place, fetched, None)
        except SampleError as error:
            return _bad(dataset, place, error)
        return None

    with reading_threads(NUM_FETCH_THREADS, "gpupool-check") as pool:
        for start in range(0, len(dataset), _CHUNK):
            # `map` gives results in order, and starts all calls at once, hence the chunks.
            yield from pool.map(read, range(start, min(start + _CHUNK, len(dataset))))


def _bad(dataset: Labelled, place: int, error: SampleError) -> BadSample:
    manifest = dataset.manifest
    row = int(manifest.rows[place])
    return BadSample(
        index=place,
        url=manifest.items.url(row),
        label=manifest.classes[int(manifest.labels[row])],
        num_bytes=dataset.num_bytes(place),
        reason=error.reason,
        detail=str(error).removeprefix(error.url).strip(),  # the table has a column for the URL
    )


def _aligned(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        texts = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        yield "  ".join(texts).rstrip()
