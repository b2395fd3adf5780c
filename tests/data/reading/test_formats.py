"""Files of formats that are named are decoded; all others are refused, and start no process."""

from __future__ import annotations

import io
import shutil
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from gpupool.core.errors import SampleError
from gpupool.data.datastores.images import ImageDatastore
from gpupool.data.reading.decode import decode
from gpupool.data.reading.image_headers import FORMATS
from gpupool.data.segmentation.masks import MaskClasses, decode_mask
from tests.fuzz.limits import only_our_errors
from tests.support.raising import raises

Image.init()
SIDE = 64
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
READERS: dict[str, Callable[[bytes], Any]] = {
    "image": lambda data: decode(data, "s3://photos/cat.jpg"),
    "ids": lambda data: decode_mask(data, "s3://photos/cat.jpg", MaskClasses.of(None)),
    "colours": lambda data: decode_mask(
        data, "s3://photos/cat.jpg", MaskClasses.of({"a": (0, 0, 0)})
    ),
}


def saved() -> dict[str, bytes]:
    """A file of each format that this Pillow can write."""
    found = {}
    for name in Image.SAVE:
        for mode in ("L", "RGB", "P", "1"):
            file = io.BytesIO()
            try:
                with warnings.catch_warnings(action="ignore"):  # some formats are deprecated
                    Image.new(mode, (SIDE, SIDE)).save(file, name)
            except (OSError, ValueError):  # not of this mode, or by another library
                continue
            found[name] = file.getvalue()
            break
    return found


def card(text: str) -> bytes:
    return text.encode().ljust(80)


SAVED = saved()
ICON = io.BytesIO()
Image.new("RGB", (16, 16)).save(ICON, "ICO", bitmap_format="bmp")
# The beginnings of what Pillow opens but does not write, as its plugins read them.
OPENED = {
    "BUFR": b"BUFR" + bytes(20),
    "CUR": ICON.getvalue()[:2] + b"\2" + ICON.getvalue()[3:],
    "DCX": struct.pack("<III", 0x3ADE68B1, 12, 0) + SAVED["PCX"],
    "FITS": b"".join(
        map(
            card,
            (
                "SIMPLE  =                    T",
                "BITPIX  =                    8",
                "NAXIS   =                    2",
                "NAXIS1  =                    8",
                "NAXIS2  =                    8",
                "END",
            ),
        )
    ).ljust(2880)
    + bytes(2880),
    "FLI": struct.pack("<IHHHHHHI", 128, 0xAF11, 1, 8, 8, 8, 3, 5).ljust(128, b"\0")
    + struct.pack("<IHH8x", 16, 0xF1FA, 0),
    "FTEX": b"FTEX" + struct.pack("<8i", 0x10000, 8, 8, 1, 1, 1, 32, 192) + bytes(192),
    "GBR": struct.pack(">5I", 28, 2, 8, 8, 1) + b"GIMP" + struct.pack(">I", 1) + bytes(64),
    "GRIB": b"GRIB\0\0\0\1" + bytes(20),
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(20),
    "IPTC": b"\x1c\3\x3c\0\2\1\0\x1c\3\x14\0\1\x08\x1c\3\x1e\0\1\x08\x1c\3\x78\0\1\1"
    b"\x1c\x08\x0a\0\4abcd",
    "MCIDAS": struct.pack("!64I", 0, 4, *[0] * 6, 8, 8, 1, 0, 0, 0, 1, *[0] * 18, 256, *[0] * 30),
    "MPEG": b"\0\0\1\xb3\0\x80\x08" + bytes(20),
    "PCD": bytes(2048) + b"PCD_".ljust(97 * 2048, b"\0"),
    "PIXAR": b"\200\350\0\0".ljust(416, b"\0") + struct.pack("<6H", 8, 8, 0, 0, 14, 2) + bytes(600),
    "PSD": b"8BPS" + struct.pack(">H6xHIIHH", 1, 3, 8, 8, 8, 3) + bytes(206),
    "SUN": struct.pack(">8I", 0x59A66A95, 8, 8, 8, 64, 1, 0, 0) + bytes(64),
    "WMF": struct.pack("<I6HI", 0x9AC6CDD7, 0, 0, 0, 8, 8, 72, 0) + b"\0\0\1\0\t\0" + bytes(40),
    "XPM": b'/* XPM */\nstatic char *a[] = {\n"2 1 1 1",\n"a c #000000",\n"aa",\n};\n',
    "XVTHUMB": b"P7 332\n#END_OF_COMMENTS\n8 8 255\n" + bytes(64),
}
FILES = SAVED | OPENED


def test_nearly_all_that_pillow_knows_is_here() -> None:
    assert set(FORMATS) <= SAVED.keys()
    assert Image.OPEN.keys() - FILES.keys() <= {"IMT"}
    for name in OPENED:
        with Image.open(io.BytesIO(OPENED[name])) as image:
            assert image.format is not None
            assert image.format.upper() == name


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("name", FILES)
def test_a_file_is_decoded_if_its_format_is_named_and_refused_else(name: str, kind: str) -> None:
    if name in (*FORMATS, "MPO"):  # which is a JPEG with others behind it
        if (kind, name) == ("ids", "WEBP"):  # which knows no grey
            kind = "colours"
        assert READERS[kind](FILES[name]).shape[-2:] == (SIDE, SIDE)
        return
    with raises(SampleError, " known format (BMP, GIF"):
        READERS[kind](FILES[name])


@pytest.mark.parametrize("kind", READERS)
def test_no_program_in_a_picture_is_run(kind: str, tmp_path: Path) -> None:
    if shutil.which("gs") is None:
        pytest.skip("Ghostscript is not installed: Pillow would run no PostScript")
    mark = tmp_path / "mark"
    # Ghostscript lets a program write where temporary files are
    data = POSTSCRIPT + f"({mark}) (w) file dup (I was here) writestring closefile\n".encode()
    look = "import io, sys; from PIL import Image; Image.open(sys.stdin.buffer).load()"
    command = [sys.executable, "-c", look]
    subprocess.run(command, input=data, env={"TMPDIR": str(tmp_path)}, timeout=60, check=True)
    assert mark.read_text() == "I was here"  # so does Pillow by itself
    mark.unlink()
    with raises(SampleError, "cat.jpg ", " known format (BMP, GIF"):
        READERS[kind](data)
    assert not mark.exists()


@pytest.mark.parametrize("kind", READERS)
def test_a_program_without_end_in_a_picture_keeps_nobody(kind: str) -> None:
    with only_our_errors():
        READERS[kind](POSTSCRIPT + b"{ } loop\n")


def test_a_datastore_tells_of_a_program_as_of_any_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "cat.jpg").write_bytes(POSTSCRIPT + b"{ } loop\n")
    ds = ImageDatastore(str(tmp_path))
    (picture,) = ds.preview(1)
    (bad,) = ds.check()
    assert (picture.problem, bad.reason) == ("damaged", "damaged")
    assert bad.detail.startswith("is damaged or not an image: its first bytes are those of no")
