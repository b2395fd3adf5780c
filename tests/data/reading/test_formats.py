"""Files of formats that are named are decoded; all others are refused, and start no process."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from gpupool.core.errors import SampleError
from gpupool.data.reading.decode import FORMATS, decode
from gpupool.data.segmentation.datastore import MaskClasses, decode_mask
from tests.support.raising import raises

Image.init()
SIDE = 64
COLOURS = MaskClasses.of({"a": (0, 0, 0)})
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
READERS: dict[str, Callable[[bytes], Any]] = {
    "image": lambda data: decode(data, "s3://photos/cat.jpg"),
    "mask": lambda data: decode_mask(data, "s3://photos/cat.jpg", COLOURS),
}


def saved() -> dict[str, bytes]:
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


@pytest.mark.parametrize("kind", READERS)
def test_a_file_is_decoded_if_its_format_is_named_and_refused_else(kind: str) -> None:
    for name, data in saved().items():
        if name in (*FORMATS, "MPO"):  # which is a JPEG with others behind it
            assert READERS[kind](data).shape[-2:] == (SIDE, SIDE), name
        else:
            with raises(SampleError, "cat.jpg is "):
                READERS[kind](data)


def test_no_program_in_a_picture_is_run(tmp_path: Path) -> None:
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
    for read in READERS.values():
        with raises(SampleError, "cat.jpg ", " known format (BMP, GIF"):
            read(data)
    assert not mark.exists()
