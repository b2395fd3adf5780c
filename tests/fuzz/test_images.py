"""Images that anybody may have made: decoded, or refused in one sentence."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.data.reading.decode import FORMATS, decode
from gpupool.data.segmentation.datastore import MaskClasses, decode_mask
from tests.data.reading.test_decode import file, picture
from tests.fuzz.limits import fuzzed, only_our_errors

CLASSES = (MaskClasses.of(None), MaskClasses.of({"a": 7}), MaskClasses.of({"a": (0, 0, 7)}))
BEGINNING = 200  # bytes: in these nearly all headers lie
VARIANTS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "BMP": [("RGB", {}), ("P", {})],
    "GIF": [("P", {}), ("L", {"interlace": True})],
    "JPEG": [("RGB", {}), ("CMYK", {"progressive": True}), ("L", {"orientation": 6})],
    "PNG": [("RGBA", {"orientation": 6}), ("P", {}), ("I;16", {})],
    "PPM": [("RGB", {}), ("L", {}), ("1", {})],
    "TIFF": [
        ("RGB", {"orientation": 6}),
        ("L", {"compression": "tiff_deflate"}),
        ("RGB", {"compression": "jpeg"}),
        ("1", {"compression": "group4"}),
    ],
    "WEBP": [("RGB", {"lossless": False}), ("RGBA", {"orientation": 6})],
}


def with_right_checksums(png: bytes) -> bytes:
    """A PNG whose chunks are believed, whatever is in them."""
    out, at = png[:8], 8
    while at + 12 <= len(png):
        (length,) = struct.unpack_from(">I", png, at)
        if at + 12 + length > len(png):
            break
        body = png[at + 4 : at + 8 + length]
        out += png[at : at + 4] + body + struct.pack(">I", zlib.crc32(body))
        at += 12 + length
    return out + png[at:]


places = st.one_of(st.integers(0, BEGINNING), st.floats(0, 1, exclude_max=True))
values = st.one_of(st.integers(0, 255), st.sampled_from([0, 1, 127, 128, 254, 255]))
changes = st.lists(st.tuples(places, values), max_size=6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "mode", "settings"),
    [(kind, *variant) for kind in FORMATS for variant in VARIANTS[kind]],
    ids=str,
)
def test_changed_and_cut_bytes(kind: str, mode: str, settings: dict[str, Any]) -> None:
    whole = file(picture(mode), kind, **settings)
    decode(whole, "x")  # torch is loaded, and the file is right

    @fuzzed
    @given(changes, st.floats(0, 1), st.booleans())
    def try_one(changes: list[tuple[float, int]], share: float, is_whole: bool) -> None:
        data = bytearray(whole)
        for at, value in changes:
            data[int(at * len(whole)) if isinstance(at, float) else at % len(whole)] = value
        if not is_whole:
            data = data[: int(share * len(whole))]
        content = with_right_checksums(bytes(data)) if kind == "PNG" else bytes(data)
        with only_our_errors():
            assert decode(content, "x").ndim == 3
        for classes in CLASSES:
            with only_our_errors():
                assert decode_mask(content, "x", classes).ndim == 2

    try_one()
