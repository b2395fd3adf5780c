"""Which images of a datastore cannot be used, found by reading all of them. Runs anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupool.core.formatting import text_table
from gpupool.core.progress import progress
from gpupool.data.reading.samples import tried

_SHOWN = 50


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

    def shown(self) -> tuple[str, Sequence[tuple[str, ...]]]:
        """What a view shows: one sentence, and as many rows, as `HEADER` says, as fit."""
        if not self:
            return f"All {self.num_checked:,} images can be read.", []
        reasons = [bad.reason for bad in self]
        kinds = sorted(set(reasons), key=lambda kind: (-reasons.count(kind), kind))
        counted = ", ".join(f"{reasons.count(kind):,} {kind}" for kind in kinds)
        more = f" The first {_SHOWN}:" if len(self) > _SHOWN else ""
        rows = [(b.url, b.label, f"{b.num_bytes:,}", b.reason, b.detail) for b in self[:_SHOWN]]
        summary = f"{len(self):,} of {self.num_checked:,} images cannot be used: {counted}."
        return summary + more, rows

    def __repr__(self) -> str:
        summary, rows = self.shown()
        return f"{summary}\n{text_table([self.HEADER, *rows])}" if rows else summary


def check(dataset: Any) -> CheckResult:
    """Read and decode every sample of a datastore once, many at a time; see `Datastore.check`."""
    bad = []

    def decode(place: int, fetched: Any) -> None:
        dataset.decode(place, fetched)  # what it gives would fill the memory

    with progress("Checking", len(dataset), "images") as bar:
        for place, error in enumerate(tried(range(len(dataset)), dataset.fetch, decode)):
            if error is not None:
                # The table has a column for the URL.
                detail = str(error).removeprefix(error.url).strip()
                name, label = dataset.name(place), dataset.label(place)
                num_bytes = dataset.num_bytes(place)
                bad.append(BadSample(place, name, label, num_bytes, error.reason, detail))
            bar.advance()
    return CheckResult(bad, len(dataset))
