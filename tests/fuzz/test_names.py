"""Names that anybody may have given: in messages, tables and lines they steer no terminal."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import gpupool.data.reading.decode  # noqa: F401 - that it imports torch counts for no file
from gpupool.core.errors import DataError, SampleError
from gpupool.core.wire.monitor_event import MonitorEvent, monitor_line
from gpupool.data.datastores.images import ImageDatastore
from gpupool.data.datastores.tar import TarDatastore
from gpupool.data.stores.folder import Folder
from gpupool.data.stores.interface import FileRef
from tests.fuzz.limits import assert_plain, fuzzed, only_our_errors
from tests.fuzz.test_tar import member
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


@fuzzed
@given(keys)
@example(EVIL)
def test_a_member_of_a_tar(key: str) -> None:
    name = f"{key.replace('.', '')}.png".replace("\0", "")
    tar = member(name, b"no image") + member(f"{name[:-4]}.cls", b"a") + bytes(1024)
    fsspec.filesystem("memory").pipe("/names/a.tar", tar)
    with only_our_errors():
        ds = TarDatastore("memory://names/a.tar")
        assert_steers_nothing(*ds.paths)
        ds[0]


@pytest.mark.parametrize("name", [EVIL, "日本\u3000語.png", "Bildschirm\u202f9 Uhr.png"])
def test_files_of_a_disk_are_shown_and_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).write_bytes(b"no image")
    ds = ImageDatastore(str(tmp_path))
    with raises(SampleError, "damaged") as caught:
        ds[0]
    assert_plain(str(caught.value))
    shown = repr(ds.check())
    assert_steers_nothing(shown, repr(ds.preview(1)), *ds.paths, caught.value.url)
    assert (os.path.exists(ds.paths[0])) == (name != EVIL)  # what is printable stays what it is


@fuzzed
@given(st.text(max_size=20), st.text(max_size=20))
@example(EVIL, EVIL)
def test_the_line_of_a_monitor(title: str, name: str) -> None:
    event = MonitorEvent(1, title, 2, 1, {}, {name: name}, "running", True, 1.0)
    line = monitor_line(event, 1, {name: 0.5})
    assert_plain(line)
    assert "\n" not in line
