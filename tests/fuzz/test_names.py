"""Names that anybody may have given: in messages and tables they steer no terminal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import gpupool.data.reading.decode  # noqa: F401 - that it imports torch counts for no file
from gpupool.core.errors import DataError, SampleError
from gpupool.data.datastores.images import ImageDatastore
from gpupool.data.stores.folder import Folder
from gpupool.data.stores.interface import FileRef
from tests.fuzz.limits import assert_plain, fuzzed
from tests.support.raising import raises

EVIL = "bad\x1b]0;evil\x07\x1b[2J\r\n\x9b31m\u202egpj\u2066.png"
CONTROLS = {*map(chr, (*range(32), *range(127, 160))), *"\u2028\u2029\u202a\u202e\u2066\u2069"}
keys = st.text(st.characters(exclude_characters="/"), min_size=1, max_size=40).filter(
    lambda key: not key.startswith(".")
)


def assert_steers_nothing(*shown: str) -> None:
    for text in shown:
        assert not CONTROLS & {*text.replace("\n", "")}, repr(text)


@fuzzed
@given(keys)
@example(EVIL)
def test_a_key_in_a_message(key: str) -> None:
    folder = Folder("memory://none")
    with pytest.raises(DataError) as caught:
        folder.read(FileRef(key, 7))
    assert_plain(str(caught.value))
    assert "\n" not in str(caught.value)
    assert_steers_nothing(folder.name(key), getattr(caught.value, "url", ""))


@pytest.mark.parametrize("name", [EVIL, "日本\u3000語.png", "Bildschirm\u202f9 Uhr.png"])
def test_files_of_a_disk_are_shown_and_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).write_bytes(b"no image")
    ds = ImageDatastore(str(tmp_path))
    with raises(SampleError) as caught:
        ds[0]
    assert_plain(str(caught.value))
    shown = repr(ds.check())
    assert_steers_nothing(shown, repr(ds.preview(1)), *ds.paths, caught.value.url)
    assert (os.path.exists(ds.paths[0])) == (name != EVIL)  # what is printable stays what it is
