"""How many pixels of each class masks have. Runs anywhere."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from gpupool.core.progress import OnProgress, progress_to
from gpupool.data.datastores.table import Files
from gpupool.data.reading.samples import NUM_FETCH_THREADS
from gpupool.data.segmentation.masks import NO_CLASS, MaskClasses, decode_mask
from gpupool.data.stores.threads import reading_threads

_CHUNK = 512  # masks handed to the threads at once: bounds what an interrupt has to cancel


def count_pixels(
    masks: Files, classes: MaskClasses, on_progress: OnProgress | None = None
) -> NDArray[np.int64]:
    """The pixels of class 0, 1, ... up to the largest there is; those of no class are left out.

    Reads every mask once, many at a time. Raises what reading and decoding raise.
    """
    import torch

    # Many threads wait for the store, but no more decode than there are cores.
    permits = threading.BoundedSemaphore(torch.get_num_threads())

    def count(row: int) -> NDArray[np.int64]:
        data = masks.read(row)
        with permits:
            pixels = decode_mask(data, masks.url(row), classes).numpy().ravel()
            return np.bincount(pixels[pixels != NO_CLASS])

    with progress_to(on_progress, "Counting pixels", len(masks), "masks") as report:
        return _added(count, len(masks), report)


def _added(
    count: Callable[[int], NDArray[np.int64]], number: int, report: OnProgress
) -> NDArray[np.int64]:
    """The sum of the counts of all masks."""
    total, done = np.zeros(0, np.int64), 0
    with reading_threads(NUM_FETCH_THREADS, "gpupool-count") as pool:
        for start in range(0, number, _CHUNK):
            for one in pool.map(count, range(start, min(start + _CHUNK, number))):
                # `bincount` ends at the largest class that a mask has.
                longer, shorter = (one, total) if len(one) > len(total) else (total, one)
                total = longer.copy()
                total[: len(shorter)] += shorter
                done += 1
                report(done, number)
    return total
