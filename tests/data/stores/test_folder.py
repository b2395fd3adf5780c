"""Files of stores of any kind: listed, read, and what their faults look like."""

from __future__ import annotations

import functools
import http.server
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpupool.core.errors import (
    DataError,
    MissingSampleError,
    OptionsError,
)
from gpupool.data.stores.folder import FileRef, Folder
from gpupool.data.stores.writable import Target
from tests.support.raising import raises

NAMES = ("in/a/1.txt", "in/b/2.txt")
CONTENT = b"0123456789"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    with zipfile.ZipFile(folder / "all.zip", "w") as archive:
        for name in NAMES:
            archive.writestr(name, CONTENT)
    for url in (str(folder), "memory://fetch"):
        for name in NAMES:
            Target(url).put(name, CONTENT)
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


@pytest.mark.parametrize(
    "url", ["{0}/in", "file://{0}/in", "memory://fetch/in", "zip://in::{0}/all.zip", "{1}/in"]
)
def test_stores_of_all_kinds_are_listed_and_read(files: Path, web: str, url: str) -> None:
    folder = Folder(url.format(files, web))
    found = folder.list_files()
    paths = ["a/1.txt", "b/2.txt"]
    assert [file.path for file in found] == paths
    one = found[0]
    assert folder.read(one) == CONTENT
    # this HTTP server knows no ranges
    assert (folder.read(one, 3, 4), folder.read(one, 8)) == (b"3456", b"89")
    with raises(MissingSampleError, "a/3.txt"):
        folder.read(FileRef("a/3.txt", 10))
    with ThreadPoolExecutor(40) as pool:
        assert list(pool.map(folder.read, found * 20)) == [CONTENT] * 40


@pytest.mark.parametrize(
    ("url", "kind", "shown"),
    [
        ("memory://nowhere", "missing", ""),
        ("/no/such/folder", "missing", ""),
        ("xyzzy9://bucket", "other", "ValueError: Protocol not known: xyzzy9"),
        (__file__, "file", ""),
    ],
)
def test_faults_are_one_sentence(url: str, kind: str, shown: str) -> None:
    with raises(DataError, shown, kind=kind, url=url):
        Folder(url).list_files()


def test_what_a_url_holds_is_not_shown() -> None:
    url = "https://user:hidden@host/in?sv=1&X-Amz-Signature=hidden%2F&se=2"
    folder = Folder(url)
    assert folder.url == url
    assert folder.shown_url == "https://***@host/in?sv=1&X-Amz-Signature=***&se=2"
    assert "hidden" not in repr(folder) + folder.name("a.jpg")
    with raises(OptionsError, "***@host/in"):
        Folder("s3:/user:hidden@host/in")
