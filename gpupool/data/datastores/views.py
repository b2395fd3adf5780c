"""What is shown of a datastore: small pictures, and which images cannot be used. Runs anywhere;
imports torch when it reads them."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpupool.core.errors import OptionsError, SampleError
from gpupool.core.formatting import Table
from gpupool.core.progress import progress
from gpupool.data.reading.samples import tried

_SIDE = 128  # pixels of the longer side of a small picture, at most
_MOST = 200  # pictures that a page should hold
_SHOWN = 50  # images that cannot be used: a page should hold them


@dataclass(frozen=True, slots=True)
class Picture:
    """One image: a PNG file of at most 128 x 128 pixels, its label, URL and own size in pixels.

    `png` is empty for an image that cannot be read; `problem` then says why.
    """

    png: bytes
    label: str
    url: str
    width: int = 0
    height: int = 0
    problem: str = ""

    @classmethod
    def of(cls, pixels: NDArray[np.uint8], label: str, url: str) -> Picture:
        """One of pixels (height, width, 3), or of grey ones (height, width)."""
        from PIL import Image

        picture, file = Image.fromarray(pixels), io.BytesIO()
        width, height = picture.size
        picture.thumbnail((_SIDE, _SIDE))  # never enlarged
        picture.save(file, "PNG")
        return cls(file.getvalue(), label, url, width, height)


class Preview(tuple[Picture, ...]):
    """Some images of a datastore; a grid of pictures in a notebook. `title` says of which."""

    title: str

    def __new__(cls, pictures: Iterable[Picture] = (), title: str = "") -> Preview:
        preview = super().__new__(cls, pictures)
        preview.title = title
        return preview

    def __repr__(self) -> str:
        width = max((len(picture.label) for picture in self), default=0)
        said = [picture.problem or f"{picture.width} x {picture.height}" for picture in self]
        shown = zip(self, said, strict=True)
        return "\n".join([self.title, *(f"{p.label:{width}}  {s:>13}  {p.url}" for p, s in shown)])


def make_preview(dataset: Any, num_images: int) -> Preview:
    """The first sample of each class, the second of each, ...; see `Datastore.preview`."""
    if not 1 <= num_images <= _MOST:
        raise OptionsError(f"num_images={num_images} must be in 1..{_MOST}")
    # Stable: within a class the order of the datastore stays, so the first image is the first.
    order = np.argsort(dataset.labels, kind="stable")
    counts = np.unique(dataset.labels, return_counts=True)[1]
    turn = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)  # of its class
    chosen = order[np.argsort(turn, kind="stable")][:num_images].tolist()

    def small(place: int, fetched: Any) -> Picture:
        pixels = dataset.decode(place, fetched)[0].permute(1, 2, 0).numpy()
        return Picture.of(pixels, dataset.label(place), dataset.name(place))

    pictures = [
        Picture(b"", dataset.label(place), dataset.name(place), problem=made.reason)
        if isinstance(made, SampleError)
        else made
        for place, made in zip(chosen, tried(chosen, dataset.fetch, small), strict=True)
    ]
    shown = f"{len(pictures):,} of " if len(pictures) < len(dataset) else ""
    return Preview(pictures, f"{shown}{dataset!r}")


@dataclass(frozen=True, repr=False, eq=False)
class CheckResult(Table):
    """The first 50 images that cannot be used: URL, class, the `reason` of the SampleError and its
    text. `good` has for each image whether it can be used, as `ds.subset` takes it.
    """

    good: NDArray[np.bool_]

    def __repr__(self) -> str:
        return f"{self.title}\n{super().__repr__()}" if self.rows else self.title


def check(dataset: Any) -> CheckResult:
    good, rows, places = np.ones(len(dataset), bool), [], range(len(dataset))

    def decode(place: int, fetched: Any) -> None:
        dataset.decode(place, fetched)  # what it gives would fill the memory

    with progress("Checking", len(dataset), "images") as bar:
        for place, error in zip(places, tried(places, dataset.fetch, decode), strict=True):
            if error is not None:
                good[place] = False
                # The table has a column for the URL.
                detail = str(error).removeprefix(error.url).strip()
                rows.append((dataset.name(place), dataset.label(place), error.reason, detail))
            bar.advance()
    title = f"All {len(dataset):,} images can be read."
    if rows:
        reasons = Counter(sorted(reason for _, _, reason, _ in rows)).most_common()
        counted = ", ".join(f"{number:,} {reason}" for reason, number in reasons)
        title = f"{len(rows):,} of {len(dataset):,} images cannot be used: {counted}."
        title += f" The first {_SHOWN}:" if len(rows) > _SHOWN else ""
    columns = ("image", "class", "reason", "what is wrong")
    return CheckResult(title, columns, tuple(rows[:_SHOWN]), good)
