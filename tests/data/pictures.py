"""Image files for tests of datastores."""

from __future__ import annotations

import io

from PIL import Image


def image_file(value: int = 0, size: tuple[int, int] = (4, 3), kind: str = "PNG") -> bytes:
    """A file with an image of one grey value, `size` being (width, height)."""
    file = io.BytesIO()
    Image.new("L", size, value).save(file, kind)
    return file.getvalue()
