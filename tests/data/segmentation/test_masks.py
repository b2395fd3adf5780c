"""Masks of every kind of file become classes of pixels."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gpupool.core.errors import OptionsError, SampleError
from gpupool.data.segmentation.masks import MaskClasses, decode_mask
from tests.support.raising import raises

IDS = np.array([[0, 7, 26], [27, 255, 7]], np.uint8)
WIDE = IDS.astype(np.uint16) * 100
COLOURS = {0: (0, 0, 0), 7: (128, 64, 128), 26: (0, 0, 142), 27: (0, 0, 70), 255: (9, 9, 9)}
BY_ID = {"road": 7, "car": [26, 27], "none": 0}
BY_COLOUR = {"road": (128, 64, 128), "car": [(0, 0, 142), (0, 0, 70)], "none": (0, 0, 0)}
CLASSES = [[2, 0, 1], [1, -100, 0]]

GREY = Image.fromarray(IDS)
PALETTE = Image.frombytes("P", GREY.size, GREY.tobytes())
PALETTE.putpalette([part for value in range(256) for part in COLOURS.get(value, (1, 2, 3))])
RGB = Image.fromarray(np.array([[COLOURS[int(v)] for v in row] for row in IDS], np.uint8))


def saved(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize(
    ("image", "classes", "expected"),
    [
        (GREY, BY_ID, CLASSES),
        (PALETTE, BY_ID, CLASSES),
        (PALETTE, BY_COLOUR, CLASSES),
        (RGB, BY_COLOUR, CLASSES),
        (RGB.convert("RGBA"), BY_COLOUR, CLASSES),
        (GREY, None, IDS.tolist()),
        (PALETTE, None, IDS.tolist()),
        (GREY.convert("LA"), None, IDS.tolist()),
        (Image.fromarray(WIDE), None, WIDE.tolist()),
        (Image.fromarray(IDS > 7), None, (IDS > 7).astype(int).tolist()),
        (Image.fromarray(WIDE), {"a": 700}, [[-100, 0, -100], [-100, -100, 0]]),
    ],
)
def test_pixels_become_classes(image: Image.Image, classes: Any, expected: Any) -> None:
    for kind in ("PNG", "TIFF"):
        mask = decode_mask(saved(image, kind), "x", MaskClasses.of(classes))
        assert mask.tolist() == expected
        assert mask.dtype == (torch.int32 if expected == WIDE.tolist() else torch.int16)


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"this is no image", "(BMP, GIF"),
        (saved(Image.new("L", (400, 400)))[:-30], " a mask: "),
        (saved(RGB), "(RGB); give classes="),
        (saved(Image.new("I", (2, 2), 70_000), "TIFF"), " 0..65535"),
        (saved(Image.new("F", (2, 2)), "TIFF"), "(F); give classes="),
    ],
    ids=["text", "cut late", "colours", "large ids", "float"],
)
def test_a_bad_mask_is_named(data: bytes, shown: str) -> None:
    url = "s3://b/1.png"
    with raises(SampleError, url, shown, url=url, reason="damaged"):
        decode_mask(data, url, MaskClasses.of(BY_ID))


@pytest.mark.parametrize(
    ("classes", "shown"),
    [
        ("road", ""),
        ({"road": -1}, "-1"),
        ({"road": (1, 2, 256)}, ""),
        ({"road": []}, ""),
        ({"road": 1, "car": (1, 2, 3)}, ""),
        ({"road": 1, "car": [2, 1]}, "[2, 1]"),
        ({"road": (1, 2, 3), "car": (1, 2, 3)}, "(1, 2, 3)"),
    ],
)
def test_impossible_classes_say_what_to_give(classes: Any, shown: str) -> None:
    with raises(OptionsError, "classes", shown):
        MaskClasses.of(classes)
