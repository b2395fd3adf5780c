"""Small pictures of a datastore's images. Runs anywhere; imports torch when it reads them."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpupool.core.errors import OptionsError, SampleError
from gpupool.data.reading.samples import tried

if TYPE_CHECKING:
    import torch

_SIDE = 128  # pixels of the longer side of a small picture, at most
_MOST = 200  # pictures that a page should hold


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
        image: torch.Tensor = dataset.decode(place, fetched)[0]
        _, height, width = image.shape
        return Picture(_small_png(image), dataset.label(place), dataset.name(place), width, height)

    pictures = [
        Picture(b"", dataset.label(place), dataset.name(place), problem=made.reason)
        if isinstance(made, SampleError)
        else made
        for place, made in zip(chosen, tried(chosen, dataset.fetch, small), strict=True)
    ]
    shown = f"{len(pictures):,} of " if len(pictures) < len(dataset) else ""
    return Preview(pictures, f"{shown}{dataset!r}")


def _small_png(image: torch.Tensor) -> bytes:
    """A uint8 RGB tensor (3, height, width) as a small PNG file; never enlarged."""
    from PIL import Image

    picture, file = Image.fromarray(image.permute(1, 2, 0).numpy()), io.BytesIO()
    picture.thumbnail((_SIDE, _SIDE))
    picture.save(file, "PNG")
    return file.getvalue()
