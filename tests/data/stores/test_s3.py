"""What reads a bucket."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from gpupool.data.stores.folder import Folder
from gpupool.data.stores.interface import FileRef
from tests.servers.s3 import SeaweedServer


@pytest.fixture(scope="module")
def bucket(s3: SeaweedServer) -> str:
    url = s3.make_bucket("chain")
    s3.put_objects("chain", {"in/a.txt": b"one"})
    return url


@pytest.mark.parametrize(
    ("url", "options", "is_quick"),
    [
        ("s3://chain/in", {}, True),
        ("s3a://chain", {}, True),
        ("s3://chain", {"config_kwargs": {"read_timeout": 9}, "requester_pays": True}, True),
        ("s3://chain", {"anon": True, "client_kwargs": {"region_name": "eu-west-1"}}, True),
        ("s3://chain", {"s3_additional_kwargs": {}}, False),
        ("s3://chain", {"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}}, False),
        ("s3://chain/in?versionId=3", {}, False),
        ("s3://arn:aws:s3:us-west-2:123456789012:accesspoint/mine/in", {}, False),
        ("zip://in::s3://chain/all.zip", {}, False),
        ("memory://chain/in", {}, False),
    ],
)
def test_ordinary_buckets_are_read_by_obstore(
    s3: SeaweedServer, url: str, options: dict[str, Any], is_quick: bool
) -> None:
    os.environ.update(s3.env)
    store, prefix = Folder(url, options)._store()
    assert (store is not None) == is_quick
    assert prefix == ("in/" if is_quick and url.endswith("/in") else "")


def test_s3fs_reads_what_it_alone_understands(s3: SeaweedServer, bucket: str) -> None:
    folder = Folder(f"{bucket}/in", {**s3.storage_options, "s3_additional_kwargs": {}})
    (found,) = folder.list_files().files
    assert found.path == "a.txt"
    assert (folder.read(found.ref), folder.read(FileRef("a.txt", 0), 1, 1)) == (b"one", b"n")


def test_obstore_is_loaded_when_s3_is_read_and_not_before() -> None:
    program = (
        "import sys, gpupool; from gpupool.data.stores import folder\n"
        "folder.Folder('s3://chain/in'); print({'obstore', 's3fs', 'fsspec'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n"
