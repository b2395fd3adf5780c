"""Image files for tests of datastores."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from gpupool.data.datastores.base import Datastore
from gpupool.data.datastores.images import ImageDatastore


def image_file(value: int = 0, size: tuple[int, int] = (4, 3), kind: str = "PNG") -> bytes:
    """A file with an image of one grey value, `size` being (width, height)."""
    file = io.BytesIO()
    Image.new("L", size, value).save(file, kind)
    return file.getvalue()


def fill(root: Path, **counts: int) -> ImageDatastore:
    """A datastore with that many images of each class; their grey values count up from 0."""
    value = 0
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            (root / name / f"{number:02}.png").write_bytes(image_file(value))
            value += 1
    return ImageDatastore(str(root))


def values(ds: Datastore) -> list[int]:
    return [int(image[0, 0, 0]) for image, _ in ds.__getitems__(range(len(ds)))]
