"""Listings by pages, in parallel, through obstore; and of other kinds of stores."""

from __future__ import annotations

import functools
import http.server
import os
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupool.core import progress
from gpupool.core.errors import CredentialsError, DataError, MissingSampleError
from gpupool.core.progress import Course
from gpupool.data.datastores.images import ImageDatastore
from gpupool.data.stores import s3 as quick
from gpupool.data.stores.folder import Folder
from gpupool.data.stores.interface import FileRef
from gpupool.data.stores.retry import counts
from tests.data.stores_read import answer_when_drawn, read_many
from tests.servers.proxy import Fault
from tests.servers.s3 import SeaweedServer
from tests.servers.slow_s3 import SlowS3
from tests.support.raising import raises

KEYS = [
    *(f"c{i}/{j:02d}.jpg" for i in range(5) for j in range(12)),
    *(f"deep/d{i}/{j}.jpg" for i in range(3) for j in range(4)),
    "c2/odd name +%20é[1]&.jpg",
    "top.jpg",
    "zero",
    "z/marked/",
    "marked/",
    ".hidden/1.jpg",
    "c1/.hidden.jpg",
]


@pytest.fixture(scope="module")
def bucket(s3: SeaweedServer) -> str:
    url = s3.make_bucket("listed")
    s3.put_objects("listed", {key: b"" if key[-1] in "o/" else b"x" for key in KEYS})
    return url


@pytest.mark.long
@pytest.mark.parametrize("page", [2, 1000])
@pytest.mark.parametrize("prefix", ["", "deep"])
def test_every_object_is_listed_once_sorted_however_large_a_page(
    s3: SeaweedServer, bucket: str, page: int, prefix: str
) -> None:
    os.environ.update(s3.env)
    numbers: list[int] = []
    store, root = Folder(f"{bucket}/{prefix}")._store()
    files, _ = quick.find(store, root, numbers.append, {}, page)
    found = Folder(f"{bucket}/{prefix}").list_files()
    assert sorted(file for file in files if ".hidden" not in file.path) == found.files
    below = f"{prefix}/" if prefix else ""
    visible = [key for key in KEYS if not key.endswith("/") and ".hidden" not in key]
    expected = sorted(key[len(below) :] for key in visible if key.startswith(below))
    assert [file.path for file in found.files] == expected
    assert found.folders == (
        ["d0", "d1", "d2"] if prefix else ["c0", "c1", "c2", "c3", "c4", "deep", "marked", "z"]
    )
    assert numbers == sorted(numbers)
    assert numbers[-1] >= len(expected)  # also what is hidden


def test_odd_names_are_read_and_a_file_is_no_folder(s3: SeaweedServer, bucket: str) -> None:
    os.environ.update(s3.env)
    folder = Folder(bucket)
    assert folder.read(FileRef("c2/odd name +%20é[1]&.jpg", 1)) == b"x"
    with raises(DataError, "s3://listed/top.jpg", kind="file"):
        Folder(f"{bucket}/top.jpg").list_files()


def test_keys_that_are_no_paths_are_left_to_s3fs(s3: SeaweedServer) -> None:
    os.environ.update(s3.env)
    assert s3.make_bucket("slashes") == "s3://slashes"
    s3.put_objects("slashes", {"in/a.jpg": b"x"})
    assert [file.path for file in Folder("s3://slashes//in").list_files().files] == ["a.jpg"]
    s3.put_objects("slashes", {"in/b\nc.jpg": b"yz"})
    folder = Folder("s3://slashes/in")
    found = folder.list_files().files
    assert [file.path for file in found] == ["a.jpg", "b\nc.jpg"]
    assert [folder.read(file.ref) for file in found] == [b"x", b"yz"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name in ("a/1.txt", "b/2.txt"):
        (folder / "in" / name).parent.mkdir(parents=True)
        (folder / "in" / name).write_bytes(b"0123456789")
    with zipfile.ZipFile(folder / "all.zip", "w") as archive:
        for name in ("a/1.txt", "b/2.txt"):
            archive.write(folder / "in" / name, f"in/{name}")
    return folder


@pytest.fixture(scope="module")
def web(files: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Not into the output of the tests."""

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(files))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("kind", ["file", "zip", "http"])
def test_other_stores_are_listed_and_read(files: Path, web: str, kind: str) -> None:
    urls = {"file": f"{files}/in", "zip": f"zip://in::{files}/all.zip", "http": f"{web}/in"}
    folder = Folder(urls[kind])
    listing = folder.list_files()
    assert [file.path for file in listing.files] == ["a/1.txt", "b/2.txt"]
    assert listing.folders == ["a", "b"]
    one = listing.files[0].ref
    assert folder.read(one) == b"0123456789"
    # this HTTP server knows no ranges
    assert (folder.read(one, 3, 4), folder.read(one, 8)) == (b"3456", b"89")
    with raises(MissingSampleError, "a/3.txt"):
        folder.read(FileRef("a/3.txt", 10))
    contents = read_many(folder, ["b/2.txt", "a/1.txt"] * 20)
    assert contents == [b"0123456789"] * 40


def test_what_passes_is_tried_again_over_http_too(web: str) -> None:
    with SlowS3(web) as slow:
        folder = Folder(f"{slow.endpoint}/in")
        for fault, reason in (("503", "503"), ("cut", "cut short")):
            slow.inject(Fault(fault, match="1.txt", times=1))
            before = counts.snapshot()
            assert folder.read(FileRef("a/1.txt", 10)) == b"0123456789"
            seen = counts.snapshot() - before
            assert (seen.reads, seen.retries) == (1, 1)
            assert seen.last_reason.startswith(reason)
        slow.inject(Fault("denied"))
        with raises(CredentialsError, "in/a/1.txt", "403", kind="denied"):
            folder.read(FileRef("a/1.txt", 10))


def test_ranges_of_an_object(s3: SeaweedServer) -> None:
    os.environ.update(s3.env)
    s3.put_objects("listed", {"ranges/a": bytes(range(200))})
    folder, a = Folder("s3://listed/ranges"), FileRef("a", 200)
    whole = bytes(range(200))
    assert folder.read(a, 10, 20) == whole[10:30]
    assert folder.read(a, 190) == whole[190:]
    assert folder.read(a, 190, 50) == whole[190:]
    assert folder.read(a, 0, 1) == whole[:1]
    assert folder.read(a, 5, 0) == folder.read(a, 200, 5) == folder.read(a, 300) == b""


def test_a_slow_listing_is_counted(s3: SeaweedServer, bucket: str) -> None:
    drawn: list[Course] = []
    before = progress._opening[0]
    os.environ.update(s3.env)
    try:
        with SlowS3(s3.endpoint) as slow:
            answer_when_drawn(slow, drawn)
            os.environ["AWS_ENDPOINT_URL"] = slow.endpoint
            found = ImageDatastore(f"{bucket}/c2")
    finally:
        progress.draw_with(before)
    assert {(course.what, course.unit) for course in drawn} == {("Listing", "files")}
    assert (drawn[-1].is_over, drawn[-1].done, len(found)) == (True, 13, 13)
    assert len(drawn) >= 2
