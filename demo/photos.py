"""Real labelled photographs for the demo and the tests, and their way into a bucket."""

from __future__ import annotations

import gzip
import io
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
CACHE = Path(__file__).resolve().parent.parent / "build" / "data"
# In the order of the labels 0..9 of the data set.
FASHION = [
    "t-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle-boot",
]
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_CHUNK = 500  # files per upload call: few enough to hold in memory, many enough to overlap

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Split:
    """Grey images of shape (n, 28, 28), uint8, and the label of each, 0..9."""

    images: Pixels
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Photos:
    """Labelled images in two parts; `name` is one sentence on what they are and where from."""

    name: str
    classes: list[str]
    train: Split
    test: Split


def source() -> Photos:
    """The best real images to be had here: Debian's, else downloaded, else scikit-learn's."""
    if DEBIAN.is_dir():
        return _fashion(DEBIAN, "Fashion-MNIST (28 x 28 photographs of clothes), Debian package")
    try:
        return _fashion(_download(), "Fashion-MNIST (28 x 28 photographs of clothes), downloaded")
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())  # torchvision's spans several lines
        return _digits(f"Fashion-MNIST could not be downloaded: {reason}")


def upload(
    bucket_url: str,
    photos: Photos,
    *,
    num_train: int = 6000,
    num_test: int = 1000,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, int]:
    """Write JPEG files `train/<class>/<nnnnn>.jpg` and `test/...` below `bucket_url`.

    Each class gets the same number of them, as far as there are enough. Returns how many files
    were written: {"train": 6000, "test": 1000}.
    """
    filesystem, root = fsspec.core.url_to_fs(bucket_url, **dict(storage_options or {}))
    counts = {}
    plan = [("train", photos.train, num_train), ("test", photos.test, num_test)]
    for part, split, wanted in plan:
        chosen = _first_of_each(split.labels, wanted // len(photos.classes))
        files = _files(f"{root}/{part}", photos.classes, split, chosen)
        while chunk := dict(itertools.islice(files, _CHUNK)):
            filesystem.pipe(chunk)
        counts[part] = len(chosen)
    return counts


def _files(
    folder: str, classes: list[str], split: Split, chosen: NDArray[np.int64]
) -> Iterator[tuple[str, bytes]]:
    for number in chosen:
        name = classes[split.labels[number]]
        file = io.BytesIO()
        Image.fromarray(split.images[number]).save(file, "JPEG", quality=95)
        yield f"{folder}/{name}/{number:05d}.jpg", file.getvalue()


def _first_of_each(labels: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    return np.concatenate([np.flatnonzero(labels == label)[:count] for label in np.unique(labels)])


def _fashion(folder: Path, name: str) -> Photos:
    return Photos(name, FASHION, _idx(folder, "train"), _idx(folder, "t10k"))


def _idx(folder: Path, prefix: str) -> Split:
    """The IDX format: big-endian header of 16 bytes for images, 8 for labels, then plain bytes."""
    with gzip.open(folder / f"{prefix}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(bytearray(file.read()), np.uint8, offset=16).reshape(-1, 28, 28)
    with gzip.open(folder / f"{prefix}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8).astype(np.int64)
    return Split(images, labels)


def _download() -> Path:
    from torchvision.datasets import FashionMNIST

    FashionMNIST(str(CACHE), download=True)
    return CACHE / "FashionMNIST" / "raw"


def _digits(why: str) -> Photos:
    from sklearn.datasets import load_digits

    data = load_digits()
    bright = (data.images * (255 / 16)).astype(np.uint8)
    images = np.stack([np.asarray(Image.fromarray(image).resize((28, 28))) for image in bright])
    labels = data.target.astype(np.int64)
    name = f"handwritten digits of scikit-learn, enlarged to 28 x 28 ({why})"
    cut = len(images) * 5 // 6
    # As many of each: else an epoch of the quick start would end with a batch of three.
    first = _first_of_each(labels[:cut], 140)
    train = Split(images[first], labels[first])
    return Photos(name, DIGITS, train, Split(images[cut:], labels[cut:]))
