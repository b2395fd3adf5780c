"""Small pictures of a datastore's images. Runs anywhere; imports torch when it reads them."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpupool.core.errors import OptionsError, SampleError
from gpupool.data.reading.samples import NUM_FETCH_THREADS
from gpupool.data.reading.shards import Indices, keyed_generator

if TYPE_CHECKING:
    import torch

    from gpupool.data.datastores.check import Labelled

SIDE = 128  # pixels of the longer side of a small picture, at most
_MOST = 200  # pictures that a page should hold


@dataclass(frozen=True, slots=True)
class Picture:
    """One image: a PNG file of at most SIDE pixels, its label, URL and own size in pixels.

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
        lines = [f"{p.label:{width}}  {size_text(p):>13}  {p.url}" for p in self]
        return "\n".join([self.title, *lines])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (tuple(self), self.title)


def size_text(picture: Picture) -> str:
    """The size of an image as it is shown, or why there is none."""
    return picture.problem or f"{picture.width} x {picture.height}"


def make_preview(dataset: Labelled, num_images: int, seed: int | None) -> Preview:
    """Small pictures of some samples; see `Datastore.preview`."""
    if not 1 <= num_images <= _MOST:
        raise OptionsError(f"num_images={num_images} must be in 1..{_MOST}")
    manifest = dataset.manifest
    chosen = _choose(manifest.sample_labels, num_images, seed)
    with ThreadPoolExecutor(NUM_FETCH_THREADS, "gpupool-preview") as pool:
        pictures = list(pool.map(partial(_picture, dataset), chosen.tolist()))
    shown = f"{len(pictures):,} of " if len(pictures) < len(manifest) else ""
    return Preview(pictures, f"{shown}{dataset!r}")


def _choose(labels: NDArray[np.int64], number: int, seed: int | None) -> Indices:
    """The first sample of each class, the second of each, ... ; or drawn; in that order."""
    if seed is not None:
        return keyed_generator(seed, 0).permutation(len(labels))[:number]
    # Stable: within a class the order of the datastore stays, so the first image is the first.
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels) if len(labels) else np.zeros(0, np.int64)
    starts = np.cumsum(counts) - counts
    turn = np.arange(len(labels)) - np.repeat(starts, counts)  # which of its class
    return order[np.lexsort((labels[order], turn))][:number]


def _picture(dataset: Labelled, place: int) -> Picture:
    manifest = dataset.manifest
    row = int(manifest.rows[place])
    label = manifest.classes[int(manifest.labels[row])]
    url = manifest.items.url(row)
    try:
        image = dataset.decode(place, dataset.fetch(place), None)[0]
    except SampleError as error:
        return Picture(b"", label, url, problem=error.reason)
    _, height, width = image.shape
    return Picture(small_png(image), label, url, width, height)


def small_png(image: torch.Tensor) -> bytes:
    """A uint8 tensor (1 or 3, height, width) as a small PNG file; never enlarged."""
    import torch
    from torchvision.transforms.v2 import functional

    _, height, width = image.shape
    scale = min(1.0, SIDE / max(height, width))
    size = [max(1, round(height * scale)), max(1, round(width * scale))]
    # Without antialias a photograph that shrinks to 128 pixels would show patterns that it lacks.
    small = functional.resize(image, size, antialias=True) if scale < 1 else image
    return bytes(torch.ops.image.encode_png(small.contiguous(), 6).numpy())
