"""From the bytes of an image file to a tensor. Runs anywhere; imports torch.

Pillow opens every file. The pixels of a JPEG come from simplejpeg where that is installed
(`pip install gpupool[fast]`), which takes less time and gives the same picture.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from gpupool.core.errors import SampleError

try:
    import simplejpeg
except ImportError:  # an extra
    simplejpeg = None

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""All that is opened, whatever a file is called. Pillow knows 40 more: few are ever asked for, and
each is another parser that anybody's file would reach; of PostScript, it would run the program."""
_PHONES = {"AVIF": rb"(?s)....ftyp.{0,24}avi[fs]", "HEIC": rb"(?s)....ftyp(hei|hev|mif1|msf1)"}
_JPEG = ("JPEG", "MPO")  # an MPO is a JPEG with others behind it, as of many phones
_SCAN = b"\xff\xda\0[\x08\x0a\x0c\x0e][\1-\4]"  # how each begins: mark, length, components
_MAX_SCANS = 100  # ten are usual; each goes over all pixels, and may have a few bytes


def decode(data: bytes, name: str) -> torch.Tensor:
    """An image file as a uint8 tensor of shape (3, height, width), RGB, upright.

    The orientation in EXIF is applied; grey images get three equal channels, CMYK becomes
    RGB, transparency is dropped, 16 bits become 8. Raises SampleError as `open_image`.
    """
    with open_image(data, name, "an image") as image:
        pixels = torch.from_numpy(_pixels(data, image)).permute(2, 0, 1)
        return _upright(pixels, image)


@contextlib.contextmanager
def open_image(data: bytes, name: str, what: str) -> Iterator[Image.Image]:
    """The image in the file `name`; its pixels are not decoded yet.

    Raises SampleError, also for what the block raises: "empty" (0 bytes), "too large" (for Pillow,
    as its header says, before memory is taken), "animated", "pages" (of a TIFF), "HEIC" and "AVIF"
    (which are not opened), or "damaged": it is not `what`.
    """
    if not data:
        raise SampleError(f"{name} is empty (0 bytes)", name, "empty")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.format in _JPEG:
                _check_scans(data)
            elif getattr(image, "is_animated", False):
                reason = "pages" if image.format == "TIFF" else "animated"
                told = f"{name} has several pictures ({reason}); store each as a file of its own"
                raise SampleError(told, name, reason)
            yield image
    except SampleError:
        raise
    except UnidentifiedImageError:  # its message has the address of a buffer
        for kind, start in _PHONES.items():
            if re.match(start, data):
                told = f"{name} is a {kind} file, whatever it is called; convert it to JPEG or PNG"
                raise SampleError(told, name, kind) from None
        known = ", ".join(FORMATS)
        told = f"{name} is damaged or not {what}: it has no header of a known format ({known})"
        raise SampleError(told, name) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        told = f"{name} has too many pixels; store it smaller, or cut into pieces: {error}"
        raise SampleError(told, name, "too large") from None
    except Exception as error:  # decoders raise whatever they like about damaged files
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SampleError(f"{name} is damaged or not {what}: {reason}", name) from None


def _check_scans(data: bytes) -> None:
    found = np.frombuffer(data, np.uint8)
    marks = (found[:-1] == _SCAN[0]) & (found[1:] == _SCAN[1])  # bytes.count takes 40 us more
    # What follows a picture, as the film of a phone, may have these two bytes at any place.
    if np.count_nonzero(marks) > _MAX_SCANS < len(re.findall(_SCAN, data)):
        raise ValueError(f"it has more than {_MAX_SCANS} scans")


def _pixels(data: bytes, image: Image.Image) -> NDArray[np.uint8]:
    """(height, width, 3), as they are stored."""
    if simplejpeg is not None and image.format in _JPEG and image.mode in ("L", "RGB"):
        # It refuses all that is odd: Pillow decides.
        with contextlib.suppress(ValueError):
            fast: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB")
            return fast
    if image.mode in ("I", "F"):
        raise ValueError("it has 32 bits for each pixel; 8 and 16 are taken")
    if image.mode.startswith("I;16"):  # which Pillow would cut off at 255
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _upright(pixels: torch.Tensor, image: Image.Image) -> torch.Tensor:
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # a picture is not lost for a broken remark about it
        return pixels
    if orientation in (5, 6, 7, 8):  # it lies on its side
        pixels = pixels.transpose(1, 2)
    sides = {2: (2,), 3: (1, 2), 4: (1,), 6: (2,), 7: (1, 2), 8: (1,)}.get(orientation)
    return pixels if sides is None else pixels.flip(sides)
