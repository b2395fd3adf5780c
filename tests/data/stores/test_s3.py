"""A bucket is listed and read, by obstore and s3fs; keys are found, renewed, and never shown."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest

from gpupool.core.errors import DataError, DataNotFoundError, SampleError
from gpupool.data.stores import s3 as quick
from gpupool.data.stores.folder import FileRef, Folder, version_of, visible
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
    s3.put_objects("listed", {"in/a.txt": b"one"})
    return url


@pytest.fixture
def folder(s3: SeaweedServer, bucket: str) -> Folder:
    os.environ.update(s3.env)
    return Folder(bucket)


def quickly(folder: Folder) -> list[FileRef] | None:
    return folder._quickly(lambda *store: visible(quick.find(*store, lambda _: None, {})) or None)


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
    folder._quickly(lambda store, _: quick.find(store, "deep/", numbers.append, {}))
    assert len(numbers) >= 3


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


# ---- keys ----------------------------------------------------------------------------------------

CANARY = "canary-secret-9f8e7d"
A = FileRef("a.txt", 0)


def profile(folder: Path, text: str) -> dict[str, str]:
    """The variable that makes botocore read `text` as its configuration."""
    (folder / "config").write_text(text)
    return {"AWS_CONFIG_FILE": str(folder / "config")}


def test_keys_of_a_file_that_were_replaced_are_found_after_a_refusal(
    s3: SeaweedServer, bucket: str, tmp_path: Path
) -> None:
    """No variable changes, and nothing says that the first keys would end."""
    text = f"[profile x]\nregion = us-east-1\nendpoint_url = {s3.endpoint}\naws_access_key_id = "
    good = f"{s3.access_key}\naws_secret_access_key = {s3.env['AWS_SECRET_ACCESS_KEY']}\n"
    os.environ.update(profile(tmp_path, f"{text}{good}"), AWS_PROFILE="x")
    folder = Folder(f"{bucket}/in")
    assert folder.read(A) == b"one"
    s3.set_reader_keys({"OTHER": CANARY})
    other = f"{text}OTHER\naws_secret_access_key = {CANARY}\n"
    os.environ.update(profile(tmp_path, other), AWS_PROFILE="x", AWS_REGION="us-east-1")
    assert folder.read(A) == b"one"
    s3.set_reader_keys({})
    profile(tmp_path, f"{text}{good}")
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(folder.read(A))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [b"one"] * 8


@pytest.mark.parametrize("kind", ["no key", "other"])
def test_keys_that_cannot_be_had_are_told(tmp_path: Path, kind: str) -> None:
    fails = (
        f"[profile x]\ncredential_process = {sys.executable} -c 'raise SystemExit(\"{CANARY}\")'"
    )
    os.environ.update(profile(tmp_path, fails), AWS_PROFILE="x", AWS_SECRET_ACCESS_KEY=CANARY)
    shown = "Error when retrieving credentials"
    if kind == "other":  # a file that is not there, but no object
        shown = str(tmp_path / "token")
        os.environ.update(AWS_ROLE_ARN="arn:aws:iam::1:role/x", AWS_WEB_IDENTITY_TOKEN_FILE=shown)
        del os.environ["AWS_PROFILE"]
    with raises(DataError, shown, kind=kind) as caught:
        Folder("s3://listed/in").read(A)
    assert CANARY not in str(caught.value)


FORKED = """
import os
from gpupool.data.stores.folder import FileRef
from gpupool.data.stores.folder import Folder
folder, file = Folder("s3://listed/in"), FileRef("a.txt", 0)
assert folder.read(file) == b"one"
if child := os.fork():
    assert os.waitpid(child, 0) == (child, 7 << 8)
assert Folder("s3://listed/in").read(file) + folder.read(file) == b"oneone"
os._exit(0 if child else 7)
"""


def test_a_forked_process_reads_too(s3: SeaweedServer, bucket: str) -> None:
    """obstore would hang in a child of a process that has used it: s3fs reads there."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", FORKED],
        env={**os.environ, **s3.env},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_no_secret_is_in_what_is_raised_printed_or_logged(
    s3: SeaweedServer,
    bucket: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level("INFO")
    keys = {"AWS_ACCESS_KEY_ID": s3.access_key, "AWS_SECRET_ACCESS_KEY": CANARY}
    (tmp_path / "keys.json").write_text(
        f'{{"Version": 1, "AccessKeyId": "{s3.access_key}", "SecretAccessKey": "{CANARY}"}}'
    )
    process = f"[profile x]\ncredential_process = cat {tmp_path}/keys.json\n"
    from_file = {"AWS_PROFILE": "x", **profile(tmp_path, process)}
    told = []
    for variables in (
        {**s3.env, **keys},
        {**s3.env, **keys, "AWS_SESSION_TOKEN": CANARY},
        {**s3.env, **keys, "AWS_ENDPOINT_URL": f"http://user:{CANARY}0@127.0.0.1:9"},
        {"AWS_ENDPOINT_URL": s3.endpoint, **from_file},
    ):
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            del os.environ[name]
        os.environ.update(variables, AWS_MAX_ATTEMPTS="1")
        options = {"key": "AKIAEXAMPLE", "secret": CANARY}
        for folder in (Folder(f"{bucket}/in"), Folder(f"{bucket}/in", options)):
            with pytest.raises(DataError) as caught:
                folder.read(A)
            told += traceback.format_exception(caught.value)
            told.append(repr(folder))
    output = capfd.readouterr()
    assert CANARY not in "".join([*told, caplog.text, output.out, output.err])
