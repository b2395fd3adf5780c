"""What the first bytes of an image file say, before anything is decoded. Runs anywhere; no torch.

A file of a few KB may claim to be larger than all memory, lie on its side, be a film, or a program
(PostScript, which Pillow has Ghostscript run); decoders report it too late or not at all.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from gpupool.core.errors import SampleError

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""All that is opened, whatever a file is called. Pillow knows 40 more: few are ever asked for, and
each is another parser that anybody's file would reach."""
MAX_PIXELS = 178_956_970
"""512 MiB of RGB, as much as Pillow takes before it refuses. Scans of 100 megapixels are ordinary;
a thread that decodes the largest that is let through takes 2 GiB for a moment."""
_CPP_LINE = re.compile(r".*[.]cpp:\d+, ")  # torchvision's messages begin with theirs
_SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # the markers that begin a frame
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD9)})
_ORIENTATION = 0x0112  # the tag in EXIF
_SHORT = 3  # the type of its value
_MAX_SCANS = 100  # ten are usual; each goes over all pixels, and may have a few bytes


class Header(NamedTuple):
    """Of an image file; pixels as they are stored.

    `orientation` is that of EXIF: 1 is upright, see `gpupool.data.reading.decode`. `is_plain`: a
    JPEG of grey or YCbCr with 8 bits, as nearly all are.
    """

    width: int
    height: int
    orientation: int = 1
    is_animated: bool = False
    is_plain: bool = False


@contextmanager
def decoding(data: bytes, name: str, what: str) -> Iterator[None]:
    """What a decoder raises inside about the file `name`, as a SampleError: it is not `what`.

    Raises SampleError at once if there is no `data`.
    """
    if not data:
        raise SampleError(f"{name} is empty (0 bytes)", name, "empty")
    try:
        yield
    except SampleError:
        raise
    except Exception as error:  # decoders raise whatever they like about damaged files
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        reason = _CPP_LINE.sub("", reason)
        raise SampleError(f"{name} is damaged or not {what}: {reason}", name) from None


def open_image(data: bytes, name: str) -> Image.Image:
    """A file of one of FORMATS, by Pillow; nothing is decoded yet. For use in `decoding`.

    Raises SampleError if it has more than MAX_PIXELS, ValueError if it is of another format.
    """
    from PIL import Image, UnidentifiedImageError

    read_header(data)  # masks can be JPEGs too
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:  # names the address of a buffer
        known = ", ".join(FORMATS)
        raise ValueError(f"its first bytes are those of no known format ({known})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:  # its own limit
        raise SampleError(f"{name} has too many pixels: {error}", name, "too large") from None
    check_size(*image.size, name)
    return image


def check_size(width: int, height: int, name: str) -> None:
    """Raise SampleError for an image of more than MAX_PIXELS."""
    if width * height > MAX_PIXELS:
        raise SampleError(
            f"{name} has {width:,} x {height:,} pixels, more than the {MAX_PIXELS:,} that are "
            "decoded; store it smaller, or cut into pieces",
            name,
            "too large",
        )


def read_header(data: bytes) -> Header | None:
    """The header of a JPEG or WebP file; None for anything else.

    >>> read_header(b"RIFF" + bytes(4) + b"WEBPVP8L" + bytes(5) + bytes([3, 128, 0, 0]))
    Header(width=4, height=3, orientation=1, is_animated=False, is_plain=False)

    Raises ValueError if the file ends before its header does.
    """
    try:
        if data.startswith(b"\xff\xd8\xff"):
            return _jpeg(data)
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return _webp(data)
    except (struct.error, IndexError):
        raise ValueError("its header is cut off") from None
    return None


def _jpeg(data: bytes) -> Header:
    orientation, transform, at, header = 1, 1, 2, None
    while True:
        while data[at] == 0xFF and data[at + 1] == 0xFF:  # fill bytes
            at += 1
        if data[at] != 0xFF:
            raise ValueError(f"there is no marker at byte {at}")
        marker = data[at + 1]
        if marker in _WITHOUT_LENGTH:
            at += 2
            continue
        (length,) = struct.unpack_from(">H", data, at + 2)
        start, end = at + 4, at + 2 + length
        if marker in _SOF:
            bits, height, width, parts = struct.unpack_from(">BHHB", data, start)
            plain = bits == 8 and (parts == 1 or (parts == 3 and transform == 1))
            header = Header(width, height, orientation, is_plain=plain)
            in_one_scan = parts if marker < 0xC2 else 0
        elif marker == 0xDA and header is not None:
            if data[start] != in_one_scan and data.count(b"\xff\xda") > _MAX_SCANS:
                raise ValueError(f"it has more than {_MAX_SCANS} scans")
            return header
        elif marker == 0xE1 and data[start : start + 6] == b"Exif\0\0":
            orientation = _orientation(data[start + 6 : end])
        elif marker == 0xEE and data[start : start + 5] == b"Adobe":
            transform = data[start + 11]
        elif marker in (0xD9, 0xDA):
            raise ValueError("it has no frame")
        at = end


def _webp(data: bytes) -> Header:
    kind = data[12:16]
    if kind == b"VP8X":
        flags = data[20]
        width, height = (int.from_bytes(data[i : i + 3], "little") + 1 for i in (24, 27))
        exif = next((part for name, part in _riff(data) if name == b"EXIF"), b"")
        orientation = _orientation(exif.removeprefix(b"Exif\0\0"))
        return Header(width, height, orientation, bool(flags & 2))
    if kind == b"VP8L":
        (packed,) = struct.unpack_from("<I", data, 21)
        return Header((packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1)
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return Header(width & 0x3FFF, height & 0x3FFF)
    raise ValueError("it has no frame")


def _riff(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 12
    while at + 8 <= len(data):
        name, length = struct.unpack_from("<4sI", data, at)
        yield name, data[at + 8 : at + 8 + length]
        at += 8 + length + length % 2


def _orientation(exif: bytes) -> int:
    """The orientation in a block of EXIF; 1 if there is none, or the block is damaged."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (at,) = struct.unpack_from(f"{order}I", exif, 4)
        (num_entries,) = struct.unpack_from(f"{order}H", exif, at)
        for entry in range(at + 2, at + 2 + 12 * num_entries, 12):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", exif, entry)
            if tag == _ORIENTATION and kind == _SHORT and 1 <= value <= 8:
                return int(value)
    except struct.error:  # a picture is not lost for a broken remark about it
        return 1
    return 1
