"""What is shown of a datastore: small pictures, and which images cannot be used. Runs anywhere;
imports torch when it reads them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpupool.core.errors import OptionsError, SampleError
from gpupool.core.formatting import text_table
from gpupool.core.progress import progress
from gpupool.data.reading.samples import tried

if TYPE_CHECKING:
    import torch

_SIDE = 128  # pixels of the longer side of a small picture, at most
_MOST = 200  # pictures that a page should hold
_SHOWN = 50  # images that cannot be used


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
        from PIL import Image

        image: torch.Tensor = dataset.decode(place, fetched)[0]
        _, height, width = image.shape
        picture, file = Image.fromarray(image.permute(1, 2, 0).numpy()), io.BytesIO()
        picture.thumbnail((_SIDE, _SIDE))  # never enlarged
        picture.save(file, "PNG")
        label, url = dataset.label(place), dataset.name(place)
        return Picture(file.getvalue(), label, url, width, height)

    pictures = [
        Picture(b"", dataset.label(place), dataset.name(place), problem=made.reason)
        if isinstance(made, SampleError)
        else made
        for place, made in zip(chosen, tried(chosen, dataset.fetch, small), strict=True)
    ]
    shown = f"{len(pictures):,} of " if len(pictures) < len(dataset) else ""
    return Preview(pictures, f"{shown}{dataset!r}")


@dataclass(frozen=True, slots=True)
class BadSample:
    """One image that cannot be used: its place in the datastore, its class, and the `reason` of its
    SampleError ("missing", "damaged" ...), of which `detail` says more.
    """

    index: int
    url: str
    label: str
    reason: str
    detail: str


class CheckResult(tuple[BadSample, ...]):
    """The images that cannot be used, of `num_checked` that were read; shows as a table."""

    HEADER = ("image", "class", "reason", "what is wrong")
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
        rows = [(b.url, b.label, b.reason, b.detail) for b in self[:_SHOWN]]
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
                bad.append(BadSample(place, name, label, error.reason, detail))
            bar.advance()
    return CheckResult(bad, len(dataset))
