"""Real image files of every kind, right and wrong, as tensors or as errors that name them."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from gpupool.core.errors import SampleError
from gpupool.data.reading.decode import decode
from gpupool.data.segmentation.datastore import MaskClasses, decode_mask
from tests.support.raising import raises

WIDTH, HEIGHT = 48, 32


def picture(mode: str = "RGB") -> Image.Image:
    """Colours that run from corner to corner, so that no two sides are alike."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    red, green = x * 255 // (WIDTH - 1), y * 255 // (HEIGHT - 1)
    pixels = np.stack([red, green, (red + green) // 2], axis=-1).astype(np.uint8)
    if mode == "I;16":
        return Image.fromarray((pixels[..., 0].astype(np.uint16) << 8) + 7)
    return Image.fromarray(pixels).convert(mode)


def file(image: Image.Image, kind: str, **settings: Any) -> bytes:
    if kind == "WEBP":
        settings.setdefault("lossless", True)
    if (orientation := settings.pop("orientation", None)) is not None:
        settings["exif"] = Image.Exif()
        settings["exif"][0x0112] = orientation
    out = io.BytesIO()
    image.save(out, kind, **settings)
    return out.getvalue()


def pixels(image: Image.Image) -> torch.Tensor:
    upright = ImageOps.exif_transpose(image).convert("RGB")
    return torch.from_numpy(np.array(upright)).permute(2, 0, 1)


def huge(kind: str) -> bytes:
    data = bytearray(file(picture(), kind))
    if kind == "PNG":
        data[16:24] = struct.pack(">II", 2**31 - 1, 2**31 - 1)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    else:
        at = data.index(b"\xff\xc0") + 5
        data[at : at + 4] = struct.pack(">HH", 65500, 65500)
    return bytes(data)


def several(kind: str) -> bytes:
    others = [ImageOps.invert(picture()), picture().rotate(180)]
    return file(picture(), kind, save_all=True, append_images=others)


RIGHT: list[tuple[str, str, dict[str, Any]]] = [
    *((kind, mode, {}) for kind in ("PNG", "WEBP", "TIFF", "BMP") for mode in ("L", "RGBA", "P")),
    *((kind, "RGB", {"orientation": 6}) for kind in ("JPEG", "PNG", "WEBP", "TIFF")),
    *(("JPEG", "RGB", {"orientation": number}) for number in (1, 2, 3, 4, 5, 7, 8)),
    *(("JPEG", mode, {"quality": 80, "progressive": True}) for mode in ("L", "RGB", "CMYK")),
]


@pytest.mark.parametrize(("kind", "mode", "settings"), RIGHT, ids=str)
def test_a_file_becomes_the_upright_rgb_that_pillow_makes_of_it(
    kind: str, mode: str, settings: dict[str, Any]
) -> None:
    stored = file(picture(mode), kind, **settings)
    with Image.open(io.BytesIO(stored)) as again:
        expected = pixels(again)
    result = decode(stored, "x")
    assert (result.dtype, result.shape) == (torch.uint8, expected.shape)
    assert torch.equal(result, expected)
    # What lies behind it, as the film of a phone, counts nowhere.
    assert torch.equal(decode(stored + 200 * b"\xff\xda\xff\xda", "x"), expected)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bits_become_the_upper_8(kind: str) -> None:
    result = decode(file(picture("I;16"), kind), "x")
    assert torch.equal(result, pixels(picture())[:1].expand(3, -1, -1))
    assert result.stride(0) != 0  # a transform may write into it


def test_a_picture_is_not_lost_for_damaged_exif() -> None:
    stored = file(picture(), "PNG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\1" + b"\xff" * 9)
    assert torch.equal(decode(stored, "x"), pixels(picture()))


HEIF = b"\0\0\0\x18ftyp%s\0\0\0\0mif1%s" + bytes(500)
WRONG = {
    "empty": (b"", "empty", "(0 bytes)"),
    "text": (b"this is text, not an image", "damaged", "(BMP, GIF"),
    "half a JPEG": (file(picture(), "JPEG")[:-100], "damaged", " an image: "),
    "a huge PNG": (huge("PNG"), "too large", " pixels"),
    "a huge JPEG": (huge("JPEG"), "too large", " pixels"),
    "an animated GIF": (several("GIF"), "animated", ""),
    "an animated PNG": (several("PNG"), "animated", ""),
    "an animated WebP": (several("WEBP"), "animated", ""),
    "a TIFF of three pages": (several("TIFF"), "pages", ""),
    "a picture of an iPhone": (HEIF % (b"heic", b"heic"), "HEIC", " HEIC file"),
    "a HEIF of no brand": (HEIF % (b"mif1", b"heic"), "HEIC", " HEIC file"),
    "an AVIF": (HEIF % (b"avif", b"miaf"), "AVIF", " AVIF file"),
    "32 bits": (file(picture("I"), "TIFF"), "damaged", " 32 bits "),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_decoded_is_an_error_with_name_and_reason(case: str) -> None:
    (data, reason, shown), url = WRONG[case], "s3://photos/a/bad.jpg"
    with raises(SampleError, shown, url=url, reason=reason) as caught:
        decode(data, url)
    assert str(caught.value).startswith(f"{url} ")


def test_a_jpeg_of_endless_scans_is_refused_before_it_is_decoded() -> None:
    whole = file(picture("L"), "JPEG", progressive=True)
    size = whole.index(b"\xff\xc2") + 5
    last = whole.rindex(b"\xff\xda")
    (length,) = struct.unpack_from(">H", whole, last + 2)
    large = whole[:size] + struct.pack(">HH", 8000, 8000) + whole[size + 4 : last]
    stored = large + 5000 * whole[last : last + 2 + length] + b"\xff\xd9"  # a minute's work
    with raises(SampleError, " an image: ", " 100 scans"):
        decode(stored, "x")
    with raises(SampleError, " a mask: ", " 100 scans"):
        decode_mask(stored, "x", MaskClasses.of(None))
