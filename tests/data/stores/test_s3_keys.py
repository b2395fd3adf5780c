"""Keys for S3: found, noticed when they change, renewed, never shown; and what a fork does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from botocore.credentials import RefreshableCredentials
from botocore.exceptions import CredentialRetrievalError
from botocore.session import Session

from gpupool.core.errors import CredentialsError, DataError, DataNotFoundError
from gpupool.data.stores.folder import Folder
from gpupool.data.stores.fsspec_store import refresh_filesystems
from gpupool.data.stores.interface import FileRef
from gpupool.data.stores.objects import Objects
from gpupool.data.stores.s3_keys import Keys, ask_again_at
from tests.data.stores_read import profile
from tests.servers.proxy import Fault
from tests.servers.s3 import SeaweedServer
from tests.servers.slow_s3 import SlowS3
from tests.support.raising import raises

CANARY = "canary-secret-9f8e7d"


@pytest.fixture(scope="module")
def bucket(s3: SeaweedServer) -> str:
    url = s3.make_bucket("keys")
    s3.put_objects("keys", {"in/a.txt": b"one"})
    return url


A = FileRef("a.txt", 0)


@pytest.mark.parametrize("options", [{}, {"s3_additional_kwargs": {}}], ids=["obstore", "s3fs"])
def test_changed_variables_are_noticed_at_the_next_use(
    s3: SeaweedServer, bucket: str, options: dict[str, object]
) -> None:
    folder = Folder(f"{bucket}/in", options)
    for _ in range(2):
        os.environ.update(s3.env)
        assert folder.read(A) == b"one"
        os.environ["AWS_SECRET_ACCESS_KEY"] = CANARY
        with raises(CredentialsError, "refused", shown="SignatureDoesNotMatch") as caught:
            folder.read(A)
        assert CANARY not in str(caught.value)
    assert folder._store() is folder._store()


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


@pytest.mark.long
def test_expired_keys_are_told_with_their_end(s3: SeaweedServer, bucket: str) -> None:
    end = datetime.now(UTC) + timedelta(minutes=3)
    os.environ.update(s3.env, AWS_CREDENTIAL_EXPIRATION=end.isoformat())
    folder = Folder(f"{bucket}/in")
    with SlowS3(s3.endpoint) as slow:
        os.environ["AWS_ENDPOINT_URL"] = slow.endpoint
        assert folder.read(A) == b"one"
        slow.inject(Fault("expired"))
        ends = f" {end:%Y-%m-%d %H:%M:%S} UTC"
        with raises(CredentialsError, "refused", shown=("(ExpiredToken; ", ends)):
            folder.read(A)


def test_keys_that_end_are_told_and_new_ones_found(s3: SeaweedServer, bucket: str) -> None:
    os.environ.update(s3.env)
    assert Folder(f"{bucket}/in").read(A) == b"one"  # the first time takes longer
    end = datetime.now(UTC) + timedelta(seconds=4)
    os.environ.update(AWS_SESSION_TOKEN="", AWS_CREDENTIAL_EXPIRATION=end.isoformat())
    folder = Folder(f"{bucket}/in")
    assert folder.read(A) == b"one"
    time.sleep(max(0.0, end.timestamp() - time.time()))
    for _ in range(2):
        with raises(CredentialsError, "expired", shown=f" {end:%Y-%m-%d %H:%M:%S} UTC"):
            folder.read(A)
    new = datetime.now(UTC) + timedelta(hours=1)
    os.environ["AWS_CREDENTIAL_EXPIRATION"] = new.isoformat()
    assert folder.read(A) == b"one"


def test_keys_that_botocore_cannot_renew_are_told(tmp_path: Path, s3: SeaweedServer) -> None:
    fails = (
        f"[profile x]\ncredential_process = {sys.executable} -c 'raise SystemExit(\"{CANARY}\")'"
    )
    os.environ.update(profile(tmp_path, fails), AWS_PROFILE="x", AWS_SECRET_ACCESS_KEY=CANARY)
    with raises(CredentialsError, "no key") as caught:
        Folder("s3://keys/in").list_files()
    assert CANARY not in str(caught.value)


class Clock:
    def __init__(self) -> None:
        self.now = datetime.now(UTC).timestamp()

    def __call__(self) -> float:
        return self.now


FORKED_MEANWHILE = """
import os, threading, time
import fsspec
from gpupool.data.stores.fsspec_store import refresh_filesystems

class Slow(fsspec.asyn.AsyncFileSystem):
    protocol = "slow"
    async def set_session(self, refresh=False):
        connecting.set()
        while not is_over:
            time.sleep(0.01)

connecting, is_over = threading.Event(), False
kept = Slow()
thread = threading.Thread(target=refresh_filesystems)
thread.start()
connecting.wait()
child = os.fork()
if child == 0:
    Slow.clear_instance_cache()
    refresh_filesystems()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
is_over = True
thread.join()
"""


def test_a_process_forked_in_a_refresh_can_refresh() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED_MEANWHILE], timeout=90, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("variables", "error", "kind"),
    [
        ({"AWS_CA_BUNDLE": "/no/file"}, DataError, "certificates"),
        (
            {
                "AWS_ACCESS_KEY_ID": "",
                "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/x",
                "AWS_WEB_IDENTITY_TOKEN_FILE": "/no/file",
            },
            CredentialsError,
            "no key",
        ),
    ],
)
def test_a_file_of_settings_that_is_not_there_is_no_missing_sample(
    s3: SeaweedServer, bucket: str, variables: dict[str, str], error: type, kind: str
) -> None:
    os.environ.update(s3.env, **variables)
    with raises(error, kind, shown="/no/file") as raised:
        Folder(f"{bucket}/in").read(A)
    assert not isinstance(raised.value, DataNotFoundError)


def test_keys_are_asked_for_again_before_they_end() -> None:
    clock, issued = Clock(), [0]

    def issue() -> dict[str, str]:
        issued[0] += 1
        end = datetime.fromtimestamp(clock() + 3600, UTC).isoformat()
        name = f"KEY{issued[0]}"
        return {"access_key": name, "secret_key": CANARY, "token": "t", "expiry_time": end}

    found = RefreshableCredentials.create_from_metadata(issue(), issue, "test")
    found._time_fetcher = lambda: datetime.fromtimestamp(clock(), UTC)
    keys = Keys(lambda: found, clock)
    first = keys()
    assert (first["access_key_id"], first["token"]) == ("KEY1", "t")
    assert first["expires_at"].timestamp() == pytest.approx(clock() + 3600)
    clock.now += 2600
    assert keys()["access_key_id"] == "KEY1"
    clock.now += 200
    assert keys()["access_key_id"] == "KEY2"


def test_keys_that_cannot_be_renewed_serve_to_their_end() -> None:
    clock, end = Clock(), datetime.now(UTC) + timedelta(seconds=300)

    def fail() -> dict[str, str]:
        raise CredentialRetrievalError(provider="sso", error_msg="log in")

    found = RefreshableCredentials("KEY1", CANARY, "t", end + timedelta(hours=1), fail, "test")
    found._time_fetcher = lambda: datetime.fromtimestamp(clock(), UTC)
    keys = Keys(lambda: found, clock)
    keys()
    clock.now += 3600
    assert keys()["access_key_id"] == "KEY1"
    assert keys.failure is None
    clock.now += 300
    with pytest.raises(CredentialRetrievalError):
        keys()
    assert isinstance(keys.failure, CredentialRetrievalError)


def test_when_keys_are_asked_for_again() -> None:
    assert ask_again_at(0, None) == float("inf")
    assert ask_again_at(0, 3600) == 2700
    assert ask_again_at(0, 600) == 150
    assert ask_again_at(0, -5) == 0.5


def test_refresh_makes_used_buckets_connect_anew(s3: SeaweedServer, bucket: str) -> None:
    os.environ.update(s3.env)
    folder = Folder(f"{bucket}/in")
    folder.read(A)
    store = folder._store()
    assert isinstance(store, Objects)
    before = store._bucket.connection()
    assert store._bucket.connection() is before
    refresh_filesystems()
    assert store._bucket.connection() is not before
    assert folder.read(A) == b"one"


FORKED = """
import os, sys
from gpupool.data.stores.interface import FileRef
from gpupool.data.stores.folder import Folder
folder, file = Folder("s3://keys/in"), FileRef("a.txt", 0)
if sys.argv[1] == "used":
    assert folder.read(file) == b"one"
read, write = os.pipe()
if os.fork() == 0:
    try:
        said = Folder("s3://keys/in").read(file) + folder.read(file)
    except Exception as error:
        said = f"{type(error).__name__}: {error}".encode()
    os.write(write, said)
    os._exit(0)
os.close(write)
print(os.read(read, 1000).decode())
assert folder.read(file) == b"one"
"""


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("used", "DataError: obstore, which reads S3, was used before this process was forked"),
        ("unused", "oneone"),
    ],
)
def test_a_forked_process_never_hangs(
    s3: SeaweedServer, bucket: str, before: str, expected: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", FORKED, before],
        env={**os.environ, **s3.env},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(expected)


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """An AWS of its own that issues temporary keys; the URL of S3 and STS."""
    pytest.importorskip("moto", reason="moto is not installed")
    program = (
        "from moto.server import ThreadedMotoServer\n"
        "server = ThreadedMotoServer('127.0.0.1', 0, False); server.start()\n"
        "print(server.get_host_and_port()[1], flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        server.kill()


def test_a_role_is_taken_and_its_temporary_keys_are_used(moto: str, tmp_path: Path) -> None:
    """And keys that are no paths, which SeaweedFS would not keep, are read by s3fs."""
    text = (
        "[profile base]\naws_access_key_id = AKIAEXAMPLE\naws_secret_access_key = example\n"
        "[profile lab]\nsource_profile = base\nregion = us-east-1\n"
        "role_arn = arn:aws:iam::123456789012:role/reader\n"
    )
    os.environ.update(profile(tmp_path, text), AWS_PROFILE="lab", AWS_ENDPOINT_URL=moto)
    client = Session().create_client("s3")
    client.create_bucket(Bucket="odd")
    keys = ["in/a//b.jpg", "in/d.jpg"]
    for key in keys:
        client.put_object(Bucket="odd", Key=key, Body=key.encode())
    client.close()
    folder = Folder("s3://odd/in")
    assert folder.read(FileRef("d.jpg", 0)) == b"in/d.jpg"
    store = folder._store()
    assert isinstance(store, Objects)
    used = store._bucket.connection().keys
    assert used is not None
    assert used()["token"]
    assert store.expires_at == pytest.approx(time.time() + 3600, abs=120)
    found = folder.list_files().files
    assert sorted(f"in/{file.path}" for file in found) == sorted(keys)
    assert [folder.read(file.ref).decode() for file in found] == [f"in/{f.path}" for f in found]


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
