"""Listing and reading a bucket: by obstore, and what is left to s3fs."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from gpupool.core.errors import DataError, DataNotFoundError, SampleError
from gpupool.data.stores import s3 as quick
from gpupool.data.stores.folder import Folder
from gpupool.data.stores.interface import FileInfo, FileRef, Listing
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


def quickly(folder: Folder) -> Listing | None:
    return folder._asked_quickly(lambda *store: quick.find(*store, lambda _: None, {}))


@pytest.mark.parametrize("prefix", ["deep", "c2", "odd", "odd/a", "slash", "slash/a"])
def test_every_object_is_listed_once_sorted(folder: Folder, prefix: str) -> None:
    below = Folder(f"{folder.url}/{prefix}")
    found = below.list_files()
    assert found == below._call(below._list_all)  # s3fs
    assert quickly(below) == (None if prefix in ("odd", "slash", "slash/a") else found)
    assert [below.read(file.ref) for file in found.files if file.size > 1] in ([], [b"yz"])


def test_sizes_versions_and_empty_folders_are_listed(folder: Folder, s3: SeaweedServer) -> None:
    s3.put_objects("listed", {"grows/a/1.txt": b"one", "grows/void/": b""})
    grows = Folder(f"{folder.url}/grows")
    one = FileInfo("a/1.txt", 3, "f97c5d29941bfb1b2fdab0874906ab82")
    assert grows.list_files() == Listing([one], ["a", "void"])
    s3.put_objects("listed", {"grows/2.txt": b""})
    assert len(grows.list_files().files) == 2
    names = [file.path for file in folder.list_files().files]
    assert {key for key in KEYS if key[-1] != "/" and ".h" not in key} <= {*names}
    assert not {"void", "deep", "deep/d1"} & {*names}
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
    found = Folder("s3://listed//c0").list_files().files
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
    s3.put_objects("listed", {"changes/a": b"first", "changes/b": b"", "changes/c": b"12345"})
    changes = Folder(f"{folder.url}/changes")
    a, b, c = (file.ref for file in changes.list_files().files)
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


@pytest.mark.parametrize(
    ("url", "options", "is_quick"),
    [
        ("s3://listed/c0", {}, True),
        ("s3a://listed/c0", {}, True),
        ("s3://listed/c0", {"config_kwargs": {"read_timeout": 9}, "requester_pays": True}, True),
        ("s3://listed/c0", {"client_kwargs": {"region_name": "eu-west-1"}}, True),
        ("s3://listed/c0", {"s3_additional_kwargs": {}}, False),
        ("s3://listed/c0", {"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}}, False),
    ],
)
def test_with_ordinary_options_obstore_lists(
    folder: Folder, url: str, options: dict[str, Any], is_quick: bool
) -> None:
    assert (quickly(Folder(url, options)) is not None) == is_quick


def test_obstore_is_loaded_when_s3_is_read_and_not_before() -> None:
    program = (
        "import sys, gpupool; from gpupool.data.stores import folder\n"
        "folder.Folder('s3://chain/in'); print({'obstore', 's3fs', 'fsspec'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n"
