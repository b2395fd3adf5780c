"""Listing and reading a bucket: by obstore, and what is left to s3fs."""

from __future__ import annotations

import os
from typing import Any

import pytest

from gpupool.core.errors import DataError, DataNotFoundError, SampleError
from gpupool.data.stores import s3 as quick
from gpupool.data.stores.folder import Folder
from gpupool.data.stores.interface import FileRef, version_of
from tests.servers.s3 import SeaweedServer
from tests.support.raising import raises

KEYS = [
    *(f"c{i}/{j:02d}.jpg" for i in range(5) for j in range(12)),
    *(f"deep/d{i}/{j}.jpg" for i in range(3) for j in range(4)),
    "c2/odd name +%20é[1]&.jpg",
    "top.jpg",
    "zero",
    "deep/d1/",
    "deep/",
    "void/",
    ".hidden/1.jpg",
    "c1/.hidden.jpg",
]


@pytest.fixture(scope="module")
def bucket(s3: SeaweedServer) -> str:
    url = s3.make_bucket("listed")
    s3.put_objects("listed", {key: b"" if key[-1] in "o/" else b"x" for key in KEYS})
    s3.put_objects("listed", {"odd/a/mark": b"", "odd/a/1.jpg": b"x", "slash/a/b\nc.jpg": b"yz"})
    return url


@pytest.fixture
def folder(s3: SeaweedServer, bucket: str) -> Folder:
    os.environ.update(s3.env)
    return Folder(bucket)


def quickly(folder: Folder) -> list[FileRef] | None:
    return folder._quickly(lambda *store: quick.find(*store, lambda _: None, {}))


@pytest.mark.parametrize("prefix", ["deep", "c2", "odd", "odd/a", "slash", "slash/a"])
def test_every_object_is_listed_once_sorted(folder: Folder, prefix: str) -> None:
    below = Folder(f"{folder.url}/{prefix}")
    found = below.list_files()
    assert found == below._call(below._list_all)  # s3fs
    assert quickly(below) == (None if prefix in ("slash", "slash/a") else found)
    assert [below.read(file) for file in found if file.size > 1] in ([], [b"yz"])


def test_sizes_and_versions_are_listed(folder: Folder, s3: SeaweedServer) -> None:
    s3.put_objects("listed", {"grows/a/1.txt": b"one", "grows/void/": b""})
    grows = Folder(f"{folder.url}/grows")
    one = FileRef("a/1.txt", 3, version_of("f97c5d29941bfb1b2fdab0874906ab82"))
    assert grows.list_files() == [one]
    s3.put_objects("listed", {"grows/2.txt": b""})
    assert len(grows.list_files()) == 2
    names = {file.path for file in folder.list_files()}
    assert {key for key in KEYS if key[-1] not in "/o" and ".h" not in key} <= names
    assert not {"void", "deep", "deep/d1"} & names
    numbers: list[int] = []
    Folder(f"{folder.url}/deep").list_files(numbers.append)
    assert (numbers[-1], len(numbers) > 1) == (12, True)


def test_odd_names_are_read_and_a_file_is_no_folder(folder: Folder) -> None:
    assert folder.read(FileRef("c2/odd name +%20é[1]&.jpg", 1)) == b"x"
    with raises(DataError, "s3://listed/top.jpg", kind="file"):
        Folder(f"{folder.url}/top.jpg").list_files()
    for url in ("s3://no-such-bucket/in", "s3://no-such-bucket", "s3://listed/on"):
        with raises(DataNotFoundError, kind="missing", url=url):
            Folder(url).list_files()
    found = Folder("s3://listed//c0").list_files()
    assert len(found) == 12


def test_ranges_of_an_object(folder: Folder, s3: SeaweedServer) -> None:
    whole, a = bytes(range(200)), FileRef("ranges/a", 200)
    s3.put_objects("listed", {"ranges/a": whole})
    assert folder.read(a, 10, 20) == whole[10:30]
    assert folder.read(a, 190) == folder.read(a, 190, 50) == whole[190:]
    assert folder.read(a, 0, 1) == whole[:1]
    assert folder.read(a, 5, 0) == folder.read(a, 200, 5) == folder.read(a, 300) == b""


def test_an_object_that_is_other_than_its_listing_is_named(
    folder: Folder, s3: SeaweedServer
) -> None:
    s3.put_objects("listed", {"changes/a": b"first", "changes/b.txt": b"", "changes/c": b"12345"})
    changes = Folder(f"{folder.url}/changes")
    a, b, c = changes.list_files()
    assert changes.read(a) == b"first"
    s3.put_objects("listed", {"changes/a": b"other", "changes/c": b"123456"})
    for file, reason in (
        (a, "changed"),
        (c, "changed"),
        (b, "empty"),
        (FileRef("d", 3), "missing"),
    ):
        with raises(SampleError, reason=reason, url=f"s3://listed/changes/{file.path}"):
            changes.read(file)
    with raises(SampleError, reason="changed"):
        changes.read(c, 1, 2)


def test_with_ordinary_options_obstore_lists(folder: Folder) -> None:
    ordinary: list[dict[str, Any]] = [
        {"config_kwargs": {"read_timeout": 9}, "requester_pays": True},
        {"client_kwargs": {"region_name": "eu-west-1"}},
    ]
    others: list[dict[str, Any]] = [
        {"s3_additional_kwargs": {}},
        {"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}},
    ]
    assert all(quickly(Folder("s3a://listed/c0", options)) for options in ordinary)
    assert not any(quickly(Folder("s3://listed/c0", options)) for options in others)
