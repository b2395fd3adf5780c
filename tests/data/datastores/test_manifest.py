"""Tables of many files: what is kept, and what travels."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gpupool.data.datastores.compact_arrays import Texts, pack, unpack
from gpupool.data.datastores.manifest import Files, Manifest
from gpupool.data.stores.folder import Folder
from gpupool.data.stores.interface import FileInfo, FileRef, Source, version_of

NUMBERS = arrays.arrays(st.sampled_from(["i8", "i4", "u4", "u2", "u1"]), st.integers(0, 50))
# what a file system may hold: any text, and bytes that are none
NAMES = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.just("\udcff"))


def listing(count: int) -> list[FileInfo]:
    """As many files of two classes."""
    return [FileInfo(f"{'ab'[i % 2]}/{i}.jpg", 100 + i, f"etag{i}") for i in range(count)]


def manifest(
    count: int = 10, url: str = "/photos", classes: Sequence[str] = "ab"
) -> Manifest[Files]:
    files = Files.of(Folder(url), listing(count))
    labels = (np.arange(count) % len(classes)).astype(np.int32)
    return Manifest(files, np.arange(count), labels, tuple(classes))


def contents(some: Manifest[Files]) -> list[tuple[str, FileRef, str]]:
    """URL, reference and label of each sample."""
    return [
        (some.items.url(row), some.items.ref(row), some.classes[some.labels[row]])
        for row in some.rows
    ]


@given(NUMBERS)
def test_packed_arrays_come_back(array: np.ndarray) -> None:
    back = unpack(pack(array))
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)


@given(NAMES, NAMES, st.data())
def test_texts_come_back_taken_joined_and_pickled(
    first: list[str], second: list[str], data: st.DataObject
) -> None:
    texts = pickle.loads(pickle.dumps(Texts.of(first).join(Texts.of(second))))
    assert [texts[i] for i in range(len(texts))] == first + second
    rows = data.draw(st.lists(st.integers(0, max(0, len(texts) - 1)), max_size=9))
    rows = rows if len(texts) else []
    taken = texts.take(np.array(rows, np.int64))
    assert [taken[i] for i in range(len(taken))] == [texts[row] for row in rows]
    with pytest.raises(IndexError):
        taken[len(rows)]


def test_more_texts_than_are_gathered_at_once() -> None:
    texts = Texts.of(map(str, range(150_000)))
    rows = np.arange(149_999, -1, -1)
    assert texts.take(rows).blob == "".join(map(str, rows)).encode()


def test_a_row_is_a_reference_to_a_file() -> None:
    some = manifest().take(np.array([3, 0]))
    assert contents(some) == [
        ("/photos/b/3.jpg", FileRef("b/3.jpg", 103, version_of("etag3")), "b"),
        ("/photos/a/0.jpg", FileRef("a/0.jpg", 100, version_of("etag0")), "a"),
    ]


def test_a_part_pickles_without_the_rest() -> None:
    part = manifest(1000).take(np.array([700, 3, 700]))
    back = pickle.loads(pickle.dumps(part))
    assert contents(back) == contents(part)
    assert (len(part.items), len(back.items)) == (1000, 2)
    assert len(pickle.dumps(part)) < len(pickle.dumps(manifest(1000))) / 5


def test_joining_unites_sources_and_classes() -> None:
    first, second = manifest(4), manifest(6, "/more", "bcd")
    both = first.take(np.array([3, 0])).join(second).join(first.take(np.array([1])))
    assert both.classes == ("a", "b", "c", "d")
    parts = [first.take(np.array([3, 0])), second, first.take(np.array([1]))]
    assert contents(both) == [sample for part in parts for sample in contents(part)]
    assert [source.shown_url for source in both.items.sources] == ["/photos", "/more"]


def test_joining_parts_of_one_table_copies_nothing() -> None:
    whole = manifest()
    both = whole.take(np.array([3])).join(whole.take(np.array([2])))
    assert both.items is whole.items
    assert [label for _, _, label in contents(both)] == ["b", "a"]


class Renamed:
    """A source that reads through another one."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.shown_url = f"through {source.shown_url}"

    def name(self, path: str) -> str:
        return self.source.name(path)

    def read(self, file: FileRef, start: int = 0, length: int | None = None) -> bytes:
        return b"read: " + self.source.read(file, start, length)


def test_it_can_be_read_through_another_source(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_bytes(b"one")
    files = Files.of(Folder(str(tmp_path)), [FileInfo("1.txt", 3, "")])
    some = Manifest(files, np.arange(1), np.zeros(1, np.int32), ("a",))
    assert some.items.read(0) == b"one"
    assert some.through(Renamed).items.read(0) == b"read: one"


def test_a_million_keys_travel_in_a_few_megabytes() -> None:
    count = 1_000_000
    rng = np.random.default_rng(0)
    blob = Texts.of(f"train/n{i // 1000:08}/n{i // 1000:08}_{i * 7}.JPEG" for i in range(count))
    files = Files(
        (Folder("s3://bucket"),),
        blob,
        rng.lognormal(11, 0.4, count).astype(np.int64),
        rng.integers(0, 2**32, count, np.uint32),
        np.zeros(count, np.uint16),
    )
    labels = np.arange(count, dtype=np.int32) // 1000
    whole = Manifest(files, np.arange(count), labels, tuple(map(str, range(1000))))
    held = len(blob.blob) + 8 * count
    assert held < 50e6
    keys = len(zlib.compress(blob.blob, 1))
    sizes, versions = (len(pack(column).data) for column in (files.sizes, files.versions))
    all_of_it = len(pickle.dumps(whole))
    print(f"{keys=:,} {sizes=:,} {versions=:,} {all_of_it=:,}")
    assert keys < 4e6
    assert versions < 4.01e6  # they are random
    assert sizes < 2.7e6
    assert all_of_it < keys + sizes + versions + 1e6
