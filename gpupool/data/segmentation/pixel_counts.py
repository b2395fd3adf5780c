"""How many pixels of each class masks have. Runs anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupool.core.progress import OnProgress, progress_to
from gpupool.data.datastores.table import Files
from gpupool.data.reading.samples import Draw, read_samples
from gpupool.data.segmentation.masks import NO_CLASS, NUM_IDS, MaskClasses, decode_mask

_CHUNK = 512  # masks read at once: bounds what an interrupt has to cancel


@dataclass(frozen=True)
class _Counts:
    """`Samples`: how many pixels of each class a mask has."""

    masks: Files
    classes: MaskClasses

    def __len__(self) -> int:
        return len(self.masks)

    def num_bytes(self, index: int) -> int:
        return self.masks.num_bytes(index)

    def fetch(self, index: int) -> bytes:
        return self.masks.read(index)

    def decode(self, index: int, fetched: bytes, draw: Draw | None) -> tuple[Any, None]:
        pixels = decode_mask(fetched, self.masks.url(index), self.classes).numpy()
        return np.bincount(pixels[pixels != NO_CLASS]), None


def count_pixels(
    masks: Files, classes: MaskClasses, on_progress: OnProgress | None = None
) -> NDArray[np.int64]:
    """The pixels of class 0, 1, ... up to the largest there is; those of no class are left out.

    Reads every mask once, many at a time. Raises what reading and decoding raise.
    """
    total = np.zeros(NUM_IDS, np.int64)
    with progress_to(on_progress, "Counting pixels", len(masks), "masks") as report:
        for start in range(0, len(masks), _CHUNK):
            rows = range(start, min(start + _CHUNK, len(masks)))
            read = read_samples(_Counts(masks, classes), rows)
            for done, (counts, _) in enumerate(read, start + 1):
                total[: len(counts)] += counts
                report(done, len(masks))
    return total[: total.nonzero()[0].max(initial=-1) + 1]
