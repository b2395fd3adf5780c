"""From the bytes of an image file to a tensor. Runs anywhere; imports torch.

JPEG goes through simplejpeg where it is installed (`pip install gpupool[fast]`), which takes less
time than torchvision and gives the same picture; other JPEG and WebP go through torchvision, all
else through Pillow. PNG too: torchvision's decoder ends the process on a damaged one. And GIF, of
which torchvision decodes every frame before it says that there are several.

Of torchvision the operators are called: its functions warn since 0.29 that torchcodec will follow,
which would be an error, of "damaged" files, where a user has made warnings errors.
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from torchvision.io import ImageReadMode  # and with it torch.ops.image

from gpupool.core.errors import SampleError
from gpupool.data.reading.image_headers import Header, check_size, decoding, open_image, read_header

try:
    import simplejpeg
except ImportError:  # an extra
    simplejpeg = None

RGB = ImageReadMode.RGB.value


def decode(data: bytes, name: str) -> torch.Tensor:
    """An image file as a uint8 tensor of shape (3, height, width), RGB, upright.

    The orientation in EXIF is applied; grey images get three equal channels, CMYK becomes
    RGB, transparency is dropped, 16 bits become 8.

    Raises SampleError naming `name`: "empty" (0 bytes), "too large" (over `headers.MAX_PIXELS`,
    as its header says, before memory is taken), "animated", or "damaged": cut off, or of none of
    `headers.FORMATS`.
    """
    with decoding(data, name, "an image"):
        header = read_header(data)
        if header is None:
            return _by_pillow(data, name)
        check_size(header.width, header.height, name)
        if header.is_animated:
            raise _animation(name)
        return _oriented(_decoded(data, header), header.orientation)


def _animation(name: str) -> SampleError:
    return SampleError(
        f"{name} is an animation; an image datastore takes single images", name, "animated"
    )


def _decoded(data: bytes, header: Header) -> torch.Tensor:
    """The pixels as they are stored."""
    if header.is_plain and simplejpeg is not None:
        # It refuses all that is odd: torchvision decides.
        with contextlib.suppress(ValueError):
            return torch.from_numpy(simplejpeg.decode_jpeg(data, "RGB")).permute(2, 0, 1)
    # bytearray: torch warns about tensors over read-only memory.
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    image: torch.Tensor = torch.ops.image.decode_image(buffer, RGB)
    return image


def _oriented(image: torch.Tensor, orientation: int) -> torch.Tensor:
    """The picture upright: `orientation` is a number of EXIF."""
    if orientation >= 5:  # it lies on its side
        image = image.transpose(1, 2)
    sides = {2: (2,), 3: (1, 2), 4: (1,), 6: (2,), 7: (1, 2), 8: (1,)}.get(orientation)
    return image if sides is None else image.flip(sides)


def _by_pillow(data: bytes, name: str) -> torch.Tensor:
    from PIL import ImageOps

    with open_image(data, name) as image:
        if getattr(image, "is_animated", False):
            raise _animation(name)
        if image.mode in ("I", "F"):
            raise ValueError("it has 32 bits for each pixel; 8 and 16 are taken")
        ImageOps.exif_transpose(image, in_place=True)  # else it is copied, as by a convert to RGB
        if image.mode.startswith("I;16"):
            grey = (np.asarray(image) >> 8).astype(np.uint8)
            return torch.from_numpy(grey).repeat(3, 1, 1)
        pixels = np.array(image if image.mode == "RGB" else image.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)
