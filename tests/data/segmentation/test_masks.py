"""Masks of every kind of file become classes of pixels."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gpupool.core.errors import OptionsError, SampleError
from gpupool.data.segmentation.masks import NO_CLASS, MaskClasses, decode_mask
from tests.support.raising import raises

IDS = np.array([[0, 7, 26], [27, 255, 7]], np.uint8)
COLOURS = {0: (0, 0, 0), 7: (128, 64, 128), 26: (0, 0, 142), 27: (0, 0, 70), 255: (9, 9, 9)}
BY_ID = {"road": 7, "car": [26, 27], "none": 0}
BY_COLOUR = {"road": (128, 64, 128), "car": [(0, 0, 142), (0, 0, 70)], "none": (0, 0, 0)}
EXPECTED = [[2, 0, 1], [1, NO_CLASS, 0]]


def saved(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def grey() -> Image.Image:
    return Image.fromarray(IDS)


def palette() -> Image.Image:
    image = Image.fromarray(IDS).convert("L")
    image = Image.frombytes("P", image.size, image.tobytes())
    image.putpalette([part for value in range(256) for part in COLOURS.get(value, (1, 2, 3))])
    return image


def rgb() -> Image.Image:
    return Image.fromarray(np.array([[COLOURS[int(v)] for v in row] for row in IDS], np.uint8))


def decoded(image: Image.Image, classes: Any, kind: str = "PNG") -> torch.Tensor:
    return decode_mask(saved(image, kind), "x", MaskClasses.of(classes))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP"])
@pytest.mark.parametrize("image", [grey(), palette()], ids=["grey", "palette"])
def test_ids_become_the_place_of_their_class(image: Image.Image, kind: str) -> None:
    mask = decoded(image, BY_ID, kind)
    assert (mask.tolist(), mask.dtype) == (EXPECTED, torch.int16)


@pytest.mark.parametrize("image", [rgb(), palette(), rgb().convert("RGBA")], ids=["P", "C", "A"])
def test_colours_become_the_place_of_their_class(image: Image.Image) -> None:
    mask = decoded(image, BY_COLOUR)
    assert (mask.tolist(), mask.dtype) == (EXPECTED, torch.int16)


def test_without_classes_pixels_are_as_they_are() -> None:
    for image in (grey(), palette(), grey().convert("LA")):
        assert decoded(image, None).tolist() == IDS.tolist()
    assert decoded(Image.fromarray(IDS > 7), None).tolist() == (IDS > 7).astype(int).tolist()
    wide = IDS.astype(np.uint16) * 100
    mask = decoded(Image.fromarray(wide), None)
    assert (mask.tolist(), mask.dtype) == (wide.tolist(), torch.int32)
    assert decoded(Image.fromarray(wide), {"a": 700}).tolist() == [
        [-100, 0, -100],
        [-100, -100, 0],
    ]


@pytest.mark.parametrize(
    ("data", "reason", "shown"),
    [
        (b"", "empty", "(0 bytes)"),
        (b"this is no image", "damaged", "(BMP, GIF"),
        (saved(grey())[:50], "damaged", " a mask: "),
        (saved(Image.new("L", (400, 400)))[:-30], "damaged", " a mask: "),
        (saved(rgb()), "damaged", "(RGB); give classes="),
        (saved(Image.new("I", (2, 2), 70_000), "TIFF"), "damaged", " 0..65535"),
        (saved(Image.new("F", (2, 2)), "TIFF"), "damaged", "(F); give classes="),
    ],
    ids=["empty", "text", "cut", "cut late", "colours", "large ids", "float"],
)
def test_a_bad_mask_is_named(data: bytes, reason: str, shown: str) -> None:
    url = "s3://b/1.png"
    with raises(SampleError, url, shown, url=url, reason=reason):
        decode_mask(data, url, MaskClasses.of(BY_ID))


@pytest.mark.parametrize(
    ("classes", "shown"),
    [
        ("road", ""),
        ({"road": -1}, "-1"),
        ({"road": (1, 2, 256)}, ""),
        ({"road": []}, ""),
        ({"road": 1, "car": (1, 2, 3)}, ""),
        ({"road": 1, "car": [2, 1]}, " 1 "),
        ({"road": (1, 2, 3), "car": (1, 2, 3)}, " (1, 2, 3) "),
    ],
)
def test_impossible_classes_say_what_to_give(classes: Any, shown: str) -> None:
    with raises(OptionsError, "classes", shown):
        MaskClasses.of(classes)
