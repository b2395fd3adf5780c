"""Keys for S3: found, noticed when they change, renewed, never shown; and what a fork does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest

from gpupool.core.errors import DataError
from gpupool.data.stores.folder import Folder
from gpupool.data.stores.interface import FileRef
from tests.servers.s3 import SeaweedServer
from tests.support.raising import raises

CANARY = "canary-secret-9f8e7d"


@pytest.fixture(scope="module")
def bucket(s3: SeaweedServer) -> str:
    url = s3.make_bucket("keys")
    s3.put_objects("keys", {"in/a.txt": b"one"})
    return url


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
        Folder("s3://keys/in").read(A)
    assert CANARY not in str(caught.value)


FORKED = """
import os
from gpupool.data.stores.interface import FileRef
from gpupool.data.stores.folder import Folder
folder, file = Folder("s3://keys/in"), FileRef("a.txt", 0)
assert folder.read(file) == b"one"
if child := os.fork():
    assert os.waitpid(child, 0) == (child, 7 << 8)
assert Folder("s3://keys/in").read(file) + folder.read(file) == b"oneone"
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
