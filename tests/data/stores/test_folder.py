"""Reading from real stores, and what their faults look like."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest

from gpupool.core.errors import (
    CredentialsError,
    DataError,
    DataNotFoundError,
    OptionsError,
)
from gpupool.data.stores.folder import Folder
from gpupool.data.stores.interface import FileInfo
from gpupool.data.stores.s3 import refresh_filesystems
from tests.data.stores_read import read_many
from tests.servers.s3 import SeaweedServer
from tests.support.raising import raises

OBJECTS = {"in/a/1.txt": b"one", "in/a/[1].txt": b"brackets", "in/b/2.txt": b"two", "in/void/": b""}


@pytest.fixture(scope="module")
def bucket(s3: SeaweedServer) -> str:
    url = s3.make_bucket("fetch")
    s3.put_objects("fetch", OBJECTS)
    return url


@pytest.fixture
def in_s3(s3: SeaweedServer, bucket: str) -> Folder:
    os.environ.update(s3.env)
    return Folder(f"{bucket}/in")


def fill(url: str) -> Folder:
    for key, content in OBJECTS.items():
        if not key.endswith("/"):
            filesystem, path = fsspec.core.url_to_fs(f"{url}/{key}")
            filesystem.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            filesystem.pipe_file(path, content)
    return Folder(f"{url}/in")


def test_lists_files_with_size_and_etag_and_folders_even_empty_ones(in_s3: Folder) -> None:
    files, folders = in_s3.list_files()
    assert [file.path for file in files] == ["a/1.txt", "a/[1].txt", "b/2.txt"]
    assert files[0] == FileInfo("a/1.txt", 3, "f97c5d29941bfb1b2fdab0874906ab82")
    assert folders == ["a", "b", "void"]


def test_listing_and_reading_are_the_same_in_memory_and_on_disk(tmp_path: Path) -> None:
    for folder in (fill("memory://fetch"), fill(str(tmp_path)), fill(f"file://{tmp_path}")):
        files, folders = folder.list_files()
        assert [(file.path, file.size) for file in files] == [
            ("a/1.txt", 3),
            ("a/[1].txt", 8),
            ("b/2.txt", 3),
        ]
        assert folders == ["a", "b"]
        assert read_many(folder, ["b/2.txt", "a/[1].txt"]) == [b"two", b"brackets"]


def test_hidden_files_and_folders_are_left_out(tmp_path: Path) -> None:
    for name in ("seen/1.txt", ".ipynb_checkpoints/2.txt", "seen/.hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    files, folders = Folder(str(tmp_path)).list_files()
    assert [file.path for file in files] == ["seen/1.txt"]
    assert folders == ["seen"]


def test_a_new_object_is_listed_the_next_time(in_s3: Folder, s3: SeaweedServer) -> None:
    folder = Folder(in_s3.url.replace("/in", "/grows"))
    s3.put_objects("fetch", {"grows/1": b"1"})
    assert len(folder.list_files().files) == 1
    s3.put_objects("fetch", {"grows/x/2": b"2"})
    assert folder.list_files().folders == ["x"]


def test_a_wrong_key_is_one_sentence(in_s3: Folder) -> None:
    os.environ["AWS_ACCESS_KEY_ID"] = "WRONG"
    with raises(CredentialsError, "(InvalidAccessKeyId)", kind="refused") as caught:
        in_s3.list_files()
    assert caught.value.url == "s3://fetch/in"
    assert caught.value.__suppress_context__
    with raises(CredentialsError, "s3://fetch/in", kind="refused"):
        read_many(in_s3, ["a/1.txt"])


def test_a_missing_key_is_one_sentence(in_s3: Folder) -> None:
    del os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    with raises(CredentialsError, "in: ", "(Unable ", kind="no key"):
        in_s3.list_files()


@pytest.mark.parametrize("url", ["s3://no-such-bucket/in", "s3://no-such-bucket", "s3://fetch/on"])
def test_a_wrong_bucket_or_folder_is_one_sentence(in_s3: Folder, url: str) -> None:
    with raises(DataNotFoundError, kind="missing", url=url):
        Folder(url).list_files()


@pytest.mark.parametrize(
    ("url", "kind", "shown"),
    [
        ("memory://nowhere", "missing", ""),
        ("/no/such/folder", "missing", ""),
        ("xyzzy9://bucket", "other", "ValueError: Protocol not known: xyzzy9"),
        (__file__, "file", ""),
    ],
)
def test_other_faults_are_one_sentence_too(url: str, kind: str, shown: str) -> None:
    with raises(DataError, shown, kind=kind, url=url):
        Folder(url).list_files()


def test_secrets_are_neither_printed_nor_in_messages() -> None:
    with raises(OptionsError, "s3://***@host/in"):
        Folder("s3:/user:password@host/in")
    options = {
        "key": "hidden-0",
        "secret": "hidden-1",
        "client_kwargs": {"endpoint_url": "hidden-1 hidden-2"},
    }
    os.environ["AWS_SESSION_TOKEN"] = "hidden-2"
    folder = Folder("s3://fetch/in", options)
    with raises(DataError, "ValueError: Invalid endpoint: [hidden] [hidden]", kind="other"):
        folder.list_files()
    assert "hidden" not in repr(folder)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("ftp://user:hidden@host/in", "ftp://***@host/in"),
        (
            "zip://::https://h/a.zip?X-Amz-Signature=hidden",
            "zip://::https://h/a.zip?X-Amz-Signature=***",
        ),
        ("https://h/in?sv=1&sig=hidden%2F&se=2", "https://h/in?sv=1&sig=***&se=2"),
    ],
)
def test_what_a_url_holds_is_not_shown(url: str, shown: str) -> None:
    folder = Folder(url)
    assert (folder.url, folder.shown_url) == (url, shown)
    assert "hidden" not in repr(folder) + folder.name("a.jpg")


def test_refresh_makes_live_file_systems_take_the_new_credentials(in_s3: Folder) -> None:
    right, wrong = os.environ["AWS_ACCESS_KEY_ID"], "WRONG"
    os.environ["AWS_ACCESS_KEY_ID"] = wrong
    held = fsspec.filesystem("s3")
    with pytest.raises(PermissionError):
        held.ls("fetch/in")
    os.environ["AWS_ACCESS_KEY_ID"] = right
    with pytest.raises(PermissionError):  # what refresh_filesystems is there for
        held.ls("fetch/in")
    for _ in range(2):  # the second round proves that it is still found after the first
        os.environ["AWS_ACCESS_KEY_ID"] = right
        refresh_filesystems()
        assert len(held.ls("fetch/in")) == 3
        assert fsspec.filesystem("s3") is held
        assert len(in_s3.list_files().files) == 3
        os.environ["AWS_ACCESS_KEY_ID"] = wrong
        refresh_filesystems()
        with pytest.raises(PermissionError):
            held.ls("fetch/in")
        with pytest.raises(CredentialsError):
            in_s3.list_files()
