"""What reads a bucket."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpupool.data.stores.folder import Folder
from gpupool.data.stores.fsspec_store import Files
from gpupool.data.stores.interface import FileRef
from gpupool.data.stores.objects import Objects
from gpupool.data.stores.s3_options import split_url
from tests.servers.s3 import SeaweedServer


@pytest.fixture(scope="module")
def bucket(s3: SeaweedServer) -> str:
    url = s3.make_bucket("chain")
    s3.put_objects("chain", {"in/a.txt": b"one"})
    return url


A = FileRef("a.txt", 0)


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("s3://photos/in", Objects),
        ("s3a://photos", Objects),
        ("s3://photos//in", Files),
        ("s3://photos/in?versionId=3", Files),
        ("s3://arn:aws:s3:us-west-2:123456789012:accesspoint/mine/in", Files),
        ("zip://in::s3://photos/all.zip", Files),
        ("memory://photos/in", Files),
    ],
)
def test_ordinary_buckets_go_through_obstore(url: str, kind: type) -> None:
    assert isinstance(Folder(url)._store(), kind)
    assert (split_url(url) is not None) == (kind is Objects)


def test_s3fs_reads_what_it_alone_understands(s3: SeaweedServer, bucket: str) -> None:
    options = {**s3.storage_options, "s3_additional_kwargs": {}}
    folder = Folder(f"{bucket}/in", options)
    assert isinstance(folder._store(), Files)
    assert [file.path for file in folder.list_files().files] == ["a.txt"]
    assert (folder.read(A), folder.read(A, 1, 1)) == (b"one", b"n")


def test_obstore_is_loaded_when_s3_is_read_and_not_before() -> None:
    program = (
        "import sys, gpupool; from gpupool.data.stores import folder, fsspec_store, objects, s3\n"
        "folder.Folder('s3://chain/in')._store(); print({'obstore', 's3fs'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n"
