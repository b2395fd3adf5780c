"""Samples that are wanted now, read many at once. Runs anywhere; no torch at import."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import Any

from gpupool.data.reading.samples import Draw, Samples


def read_samples(
    dataset: Samples, indices: Iterable[int], draw: Draw | None = None
) -> list[tuple[Any, Any]]:
    """The samples at `indices`, in order: fetched many at once, decoded by as many threads as this
    process has cores.

    Raises what the first failing sample raised.
    """
    places = [int(index) for index in indices]
    if len(places) < 2:
        return [dataset.decode(place, dataset.fetch(place), draw) for place in places]
    from gpupool.data.reading.threads import Threads

    with closing(Threads(dataset, len(places))) as threads:
        threads.start()
        answers = [threads.read(place, draw) for place in places]
        return [threads.result(answer) for answer in answers]
