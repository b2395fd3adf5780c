"""Keys on the ranks: sent after the start, noticed by file systems that are open already."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import s3fs

from gpupool import CredentialsError, Pool, SpmdError
from tests.servers.s3 import SeaweedServer
from tests.support.processes import until
from tests.support.raising import raises

NOTICE = """
import s3fs
try:
    filesystem
except NameError:
    filesystem = s3fs.S3FileSystem()
len(filesystem.find("photos/test"))
"""

FOLDER_NOTICE = """
from gpupool.data.stores.folder import Folder
try:
    folder
except NameError:
    folder = Folder("s3://photos/test")
len(folder.list_files())
"""

READING = """
import os, time, s3fs
from gpupool.data.stores.folder import FileRef
from gpupool.data.stores.folder import Folder
filesystem = s3fs.S3FileSystem(use_listings_cache=False)
folder = Folder("s3://photos/test")
files = folder.list_files()
names = filesystem.find("photos/test")
first = {"key": os.environ["AWS_ACCESS_KEY_ID"], "secret": os.environ["AWS_SECRET_ACCESS_KEY"]}

def attempt(**options):
    try:
        s3fs.S3FileSystem(skip_instance_cache=True, **options).find("photos/test")
    except Exception as error:
        return repr(error)
    return "read"

num_read, keys, refused = 0, set(), "read"
while len(keys) < 3 or refused == "read":
    assert len(filesystem.cat_file(names[num_read % len(names)])) > 100
    assert len(folder.read(files[num_read % len(files)])) > 100
    keys.add(os.environ["AWS_ACCESS_KEY_ID"])
    num_read += 1
    if num_read % 25 == 0:
        refused = attempt(**first)
    time.sleep(0.1)

num_read, len(keys), refused, attempt()
"""


@pytest.fixture(autouse=True)
def nothing_propagated(pool2: Pool) -> Iterator[None]:
    """What a test has sent is not sent to the pools of later ones."""
    yield
    pool2.propagate_env("*", unset=True)


@pytest.mark.parametrize(
    ("cell", "refusal"),
    [(NOTICE, "PermissionError"), (FOLDER_NOTICE, "CredentialsError")],
)
def test_a_file_system_that_a_rank_holds_notices_new_keys(
    pool2: Pool, s3: SeaweedServer, photos_url: str, cell: str, refusal: str
) -> None:
    os.environ.update(s3.env, AWS_SECRET_ACCESS_KEY="not-the-right-one")
    pool2.propagate_env("AWS_*")
    with raises(SpmdError, ename=refusal):
        pool2.run(cell)
    os.environ.update(s3.env)
    pool2.propagate_env("AWS_*")
    assert dict(pool2.run(cell)) == {0: 100, 1: 100}


def test_the_notebooks_own_credential_chain_reaches_the_ranks(
    pool2: Pool, s3: SeaweedServer, photos_url: str, tmp_path: Path
) -> None:
    """A profile in a file, which the ranks would not find: they know nothing of AWS_PROFILE."""
    profile = tmp_path / "credentials"
    profile.write_text(
        f"[lab]\naws_access_key_id = {s3.access_key}\n"
        f"aws_secret_access_key = {s3.env['AWS_SECRET_ACCESS_KEY']}\n"
        f"endpoint_url = {s3.endpoint}\nregion = us-east-1\n"
    )
    os.environ.update(AWS_SHARED_CREDENTIALS_FILE=str(profile), AWS_PROFILE="lab")
    pool2.propagate_env("AWS_*", unset=True)
    shown = pool2.propagate_env(aws=True)
    assert set(shown) == {
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_DEFAULT_REGION",
        "AWS_ENDPOINT_URL",
    }
    count = "import s3fs; len(s3fs.S3FileSystem().find('photos/test'))"
    assert dict(pool2.run(count)) == {0: 100, 1: 100}


def reads(s3: SeaweedServer, key: str) -> bool:
    """Whether the server takes this key already."""
    mine = {"key": key, "secret": f"secret-of-{key}", "skip_instance_cache": True}
    filesystem = s3fs.S3FileSystem(**{**s3.storage_options, **mine})
    try:
        return bool(filesystem.ls("photos"))
    except PermissionError:
        return False


@pytest.mark.long
def test_a_loop_that_reads_survives_that_its_keys_expire_and_are_refused(
    pool2: Pool, s3: SeaweedServer, photos_url: str, tmp_path: Path
) -> None:
    """Each key is good for 12 s, and the server refuses it then; the loop lasts until that."""
    keys = iter(f"RENEWED{number}" for number in range(100))
    granted: list[str] = []
    over = threading.Event()

    def grant() -> None:
        """A new key; the one before goes on for a while."""
        granted.append(next(keys))
        s3.set_reader_keys({key: f"secret-of-{key}" for key in granted[-3:]})
        until(lambda: reads(s3, granted[-1]), 10.0, "that the server takes a new key")
        document = {
            "Version": 1,
            "AccessKeyId": granted[-1],
            "SecretAccessKey": f"secret-of-{granted[-1]}",
            "Expiration": (datetime.now(UTC) + timedelta(seconds=12)).isoformat(),
        }
        new = tmp_path / "new.json"
        new.write_text(json.dumps(document))
        new.replace(tmp_path / "key.json")

    def grant_again_and_again() -> None:
        while not over.wait(4.0):
            grant()

    grant()
    config = tmp_path / "config"
    config.write_text(
        f"[profile lab]\nregion = us-east-1\nendpoint_url = {s3.endpoint}\n"
        f"credential_process = cat {tmp_path / 'key.json'}\n"
    )
    os.environ.update(AWS_CONFIG_FILE=str(config), AWS_PROFILE="lab")
    pool2.propagate_env("AWS_*", unset=True)
    pool2.propagate_env(aws=True)
    issuing = threading.Thread(target=grant_again_and_again)
    issuing.start()
    try:
        result = pool2.run(READING, timeout_s=60)
    finally:
        over.set()
        issuing.join()
        pool2.propagate_env("AWS_*", unset=True)
        s3.set_reader_keys({})
    for rank in (0, 1):
        num_read, num_keys, first, last = result[rank]
        assert num_read > 20
        assert num_keys >= 3
        assert first.startswith("PermissionError"), first
        assert last == "read"


def test_without_credentials_the_error_says_where_they_may_come_from(pool2: Pool) -> None:
    with raises(CredentialsError, "AWS_PROFILE", kind="no key"):
        pool2.propagate_env(aws=True)
    os.environ["AWS_PROFILE"] = "missing"
    with raises(CredentialsError, "missing", kind="no key"):
        pool2.propagate_env(aws=True)
