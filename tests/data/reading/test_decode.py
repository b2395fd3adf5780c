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
from gpupool.data.segmentation.masks import MaskClasses, decode_mask
from tests.support.raising import raises

WIDTH, HEIGHT = 48, 32


def picture(mode: str = "RGB", size: tuple[int, int] = (WIDTH, HEIGHT)) -> Image.Image:
    """Colours that run from corner to corner, so that no two sides are alike."""
    y, x = np.mgrid[0 : size[1], 0 : size[0]]
    red, green = x * 255 // (size[0] - 1), y * 255 // (size[1] - 1)
    pixels = np.stack([red, green, (red + green) // 2], axis=-1).astype(np.uint8)
    if mode == "I;16":
        return Image.fromarray((pixels[..., 0].astype(np.uint16) << 8) + 7)
    return Image.fromarray(pixels).convert(mode)


def file(image: Image.Image, kind: str, **settings: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **settings)
    return out.getvalue()


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def with_orientation(kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    settings = {"quality": 95} if kind == "JPEG" else {"lossless": True} if kind == "WEBP" else {}
    return file(picture(), kind, exif=exif, **settings)


def png_that_claims(width: int, height: int) -> bytes:
    data = bytearray(file(picture(), "PNG"))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def jpeg_that_claims(width: int, height: int) -> bytes:
    data = bytearray(file(picture(), "JPEG"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def several(kind: str) -> bytes:
    others = [ImageOps.invert(picture()), picture().rotate(180)]
    return file(picture(), kind, save_all=True, append_images=others)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P"])
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "BMP"])
def test_kinds_and_modes_become_rgb(kind: str, mode: str) -> None:
    settings = {"lossless": True} if kind == "WEBP" else {}
    stored = file(picture(mode), kind, **settings)
    result = decode(stored, "x")
    assert (result.dtype, result.shape) == (torch.uint8, (3, HEIGHT, WIDTH))
    with Image.open(io.BytesIO(stored)) as again:
        assert torch.equal(result, pixels(again))


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bits_become_the_upper_8(kind: str) -> None:
    result = decode(file(picture("I;16"), kind), "x")
    assert torch.equal(result, pixels(picture())[:1].expand(3, -1, -1))
    assert result.is_contiguous() or result.stride(0) != 0  # a transform may write into it


def test_a_cmyk_jpeg_becomes_rgb() -> None:
    stored = file(picture("CMYK"), "JPEG", quality=95)
    result = decode(stored, "x").int()
    with Image.open(io.BytesIO(stored)) as again:
        assert again.mode == "CMYK"
        assert (result - pixels(again).int()).abs().max() <= 2
    assert (result - pixels(picture()).int()).abs().float().mean() < 4


@pytest.mark.parametrize("orientation", [1, 6, 7])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_the_orientation_of_exif_is_applied(kind: str, orientation: int) -> None:
    stored = with_orientation(kind, orientation)
    with Image.open(io.BytesIO(stored)) as again:
        expected = pixels(ImageOps.exif_transpose(again)).int()
    result = decode(stored, "x").int()
    assert result.shape == (3, *((HEIGHT, WIDTH) if orientation < 5 else (WIDTH, HEIGHT)))
    assert (result - expected).abs().max() <= 1


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_a_jpeg_is_as_pillow_decodes_it(mode: str) -> None:
    stored = file(picture(mode), "JPEG", quality=80, progressive=True)
    with Image.open(io.BytesIO(stored)) as again:
        assert torch.equal(decode(stored, "x"), pixels(again))
        # What lies behind it, as the film of a phone, counts nowhere.
        assert torch.equal(decode(stored + 200 * b"\xff\xda\xff\xda", "x"), pixels(again))


def test_a_picture_is_not_lost_for_damaged_exif() -> None:
    stored = file(picture(), "PNG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\1" + b"\xff" * 9)
    assert torch.equal(decode(stored, "x"), pixels(picture()))


HEIF = b"\0\0\0\x18ftyp%s\0\0\0\0mif1%s" + bytes(500)
WRONG = {
    "empty": (b"", "empty", "(0 bytes)"),
    "text": (b"this is text, not an image", "damaged", "(BMP, GIF"),
    "half a JPEG": (file(picture(), "JPEG")[:-100], "damaged", " an image: "),
    "half a PNG": (file(picture(), "PNG")[:-60], "damaged", " an image: "),
    "half a WebP": (file(picture(), "WEBP")[:-60], "damaged", " an image: "),
    "a huge PNG": (png_that_claims(2**31 - 1, 2**31 - 1), "too large", " pixels"),
    "a huge JPEG": (jpeg_that_claims(65500, 65500), "too large", " pixels"),
    "an animated GIF": (several("GIF"), "animated", ""),
    "an animated PNG": (several("PNG"), "animated", ""),
    "an animated WebP": (several("WEBP"), "animated", ""),
    "a TIFF of three pages": (several("TIFF"), "pages", ""),
    "a picture of an iPhone": (HEIF % (b"heic", b"heic"), "HEIC", " HEIC file"),
    "a HEIF of no brand": (HEIF % (b"mif1", b"heic"), "HEIC", " convert it"),
    "an AVIF": (HEIF % (b"avif", b"miaf"), "AVIF", " AVIF file"),
    "an AVIF of no brand": (HEIF % (b"mif1", b"avif"), "AVIF", " AVIF file"),
    "32 bits": (file(picture("I"), "TIFF"), "damaged", " 32 bits "),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_decoded_is_an_error_with_name_and_reason(case: str) -> None:
    (data, reason, shown), url = WRONG[case], "s3://photos/a/bad.jpg"
    with raises(SampleError, shown, url=url, reason=reason) as caught:
        decode(data, url)
    assert str(caught.value).startswith(f"{url} ")


def test_a_mask_of_several_pages_is_no_mask() -> None:
    with raises(SampleError, reason="pages"):
        decode_mask(several("TIFF"), "x", MaskClasses.of(None))


@pytest.mark.parametrize("kind", ["an image", "a mask"])
def test_a_jpeg_of_endless_scans_is_refused_before_it_is_decoded(kind: str) -> None:
    whole = file(picture("L"), "JPEG", progressive=True)
    size = whole.index(b"\xff\xc2") + 5
    last = whole.rindex(b"\xff\xda")
    (length,) = struct.unpack_from(">H", whole, last + 2)
    large = whole[:size] + struct.pack(">HH", 8000, 8000) + whole[size + 4 : last]
    stored = large + 5000 * whole[last : last + 2 + length] + b"\xff\xd9"  # a minute's work
    with raises(SampleError, f" {kind}: ", " 100 scans"):
        decode(stored, "x") if kind == "an image" else decode_mask(
            stored, "x", MaskClasses.of(None)
        )
