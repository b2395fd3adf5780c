"""Where the settings of a bucket come from, and what reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from botocore.session import Session

from gpupool.data.stores import s3 as s3_module
from gpupool.data.stores.folder import Folder
from gpupool.data.stores.fsspec_store import Files
from gpupool.data.stores.interface import FileRef
from gpupool.data.stores.objects import Objects
from gpupool.data.stores.s3 import resolve
from gpupool.data.stores.s3_options import S3Options, read_options, split_url
from tests.data.stores_read import profile
from tests.servers.s3 import SeaweedServer

CANARY = "canary-secret-9f8e7d"


@pytest.fixture(scope="module")
def bucket(s3: SeaweedServer) -> str:
    url = s3.make_bucket("chain")
    s3.put_objects("chain", {"in/a.txt": b"one"})
    return url


A = FileRef("a.txt", 0)
SERVICES = (
    "[profile x]\nservices = mine\nregion = eu-west-1\n[services mine]\ns3 =\n  endpoint_url = "
)
CASES = {
    "nothing": ({}, ""),
    "environment": ({"AWS_ENDPOINT_URL": "http://e:1", "AWS_DEFAULT_REGION": "eu-central-1"}, ""),
    "service first": ({"AWS_ENDPOINT_URL": "http://e:1", "AWS_ENDPOINT_URL_S3": "http://s:1"}, ""),
    "of a profile": ({"AWS_PROFILE": "x"}, "[profile x]\nendpoint_url = http://p:1\n"),
    "of its services": ({"AWS_PROFILE": "x"}, SERVICES + "http://q:1\n"),
    "ignored": (
        {"AWS_ENDPOINT_URL": "http://e:1", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"},
        "",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_endpoint_and_region_are_those_that_botocore_finds(tmp_path: Path, case: str) -> None:
    """Also shows the private name in use: `botocore.configprovider.ConfiguredEndpointProvider`."""
    variables, config = CASES[case]
    os.environ.update(variables, **profile(tmp_path, config))
    region = Session().get_config_variable("region") or "us-east-1"
    found = resolve(Session(), "photos", S3Options(addressing="path"), None)
    meta = Session().create_client("s3", region_name=region).meta
    expected = meta.endpoint_url.replace("s3.amazonaws", "s3.us-east-1.amazonaws")
    assert (found.endpoint, found.region) == (expected, region)


def test_settings_of_the_options_come_first() -> None:
    os.environ.update(AWS_ENDPOINT_URL="http://e:1", AWS_REGION="eu-north-1")
    options = read_options(
        {
            "endpoint_url": "http://o:1/",
            "client_kwargs": {"verify": False},
            "config_kwargs": {"s3": {"addressing_style": "virtual"}, "read_timeout": 3},
            "use_listings_cache": False,
        }
    )
    assert options is not None
    found = resolve(Session(), "photos", options, None)
    assert (found.endpoint, found.region) == ("http://photos.o:1", "eu-north-1")
    assert (found.verify, options.read_timeout_s) == (False, 3)
    plain = S3Options(region="cn-north-1")
    del os.environ["AWS_ENDPOINT_URL"]
    address = "https://photos.s3.cn-north-1.amazonaws.com.cn"
    assert resolve(Session(), "photos", plain, None).endpoint == address
    assert "photos." not in resolve(Session(), "dotted.name", plain, None).endpoint


@pytest.mark.parametrize(
    "options",
    [
        {"s3_additional_kwargs": {"SSECustomerKey": "x"}},
        {"session": object()},
        {"client_kwargs": {"config": object()}},
        {"config_kwargs": {"signature_version": "s3"}},
        {"key": "without a secret"},
        {"use_ssl": False},
    ],
)
def test_what_only_s3fs_understands_is_left_to_it(options: dict[str, object]) -> None:
    assert read_options(options) is None
    assert isinstance(Folder("s3://photos/in", options)._store(), Files)


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


def test_secrets_are_not_shown() -> None:
    options = S3Options(key=CANARY, secret=CANARY, token=CANARY, profile="x")
    assert repr(options) == "S3Options(profile='x')"
    connection = s3_module.Bucket("photos", S3Options(key=CANARY, secret=CANARY)).connection()
    assert CANARY not in f"{connection!r} {connection.keys!r}"


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


def test_the_environment_is_stored_where_it_is_looked_at() -> None:
    """A private name of Python's: `os.environ._data`, bytes to bytes."""
    os.environ["AWS_REGION"] = "eu-west-1"
    assert b"eu-west-1" in s3_module.environment()
    del os.environ["AWS_REGION"]
    assert b"eu-west-1" not in s3_module.environment()
