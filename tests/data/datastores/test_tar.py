"""Samples in tars as WebDataset lays them out: grouped, counted and read by ranges."""

from __future__ import annotations

import io
import os
import pickle
import stat
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import fsspec
import pytest

from gpupool.core.errors import DataError, DataNotFoundError, OptionsError, SampleError
from gpupool.data.datastores.tar import TarDatastore
from gpupool.data.stores.retry import counts
from tests.data.pictures import image_file, values
from tests.fuzz.test_tar import member, negative, record
from tests.servers.s3 import SeaweedServer
from tests.support.raising import raises


def tar_file(
    members: Mapping[str, bytes] | Iterable[tuple[str, bytes]], format: int = tarfile.PAX_FORMAT
) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as tar:
        for name, content in members.items() if isinstance(members, Mapping) else members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def shard(first: int, count: int, **more: bytes) -> bytes:
    """Images of grey values `first`, ... with number 8, 9, 10 in turn as their class."""
    members = {}
    for value in range(first, first + count):
        members[f"{value:04}.png"] = image_file(value)
        members[f"{value:04}.cls"] = str(8 + value % 3).encode()
        members |= {f"{value:04}.{name}": content for name, content in more.items()}
    return tar_file(members)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Path:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    return tmp_path / "cache"


def in_memory(name: str, *shards: bytes, **options: object) -> TarDatastore:
    files = {f"/{name}/{i}.tar": data for i, data in enumerate(shards)}
    fsspec.filesystem("memory").pipe(files)
    return TarDatastore(f"memory://{name}", **options)  # type: ignore[arg-type]


def test_tars_of_a_bucket_are_indexed_once_for_each_version(s3: SeaweedServer, cache: Path) -> None:
    os.environ.update(s3.env)
    url = f"{s3.make_bucket('tars')}/in"
    s3.put_objects("tars", {f"in/s-{i:02}.tar": shard(7 * i, 7) for i in range(3)})
    datastores = []
    for reads in (3, 0):
        before = counts.snapshot()
        datastores.append(TarDatastore(url))
        assert (counts.snapshot() - before).reads == reads
    assert stat.S_IMODE((cache / "gpupool" / "tars").stat().st_mode) == 0o700
    ds = datastores[1]
    assert ds.paths == datastores[0].paths
    assert repr(ds) == "TarDatastore(21 images, 3 classes, s3://tars/in)"
    assert ds.count_each_label() == {"8": 7, "9": 7, "10": 7}
    assert ds.paths[8] == "s3://tars/in/s-01.tar/0008.png"
    assert ds.labels.tolist() == [value % 3 for value in range(21)]
    assert ds.fetch(4) == image_file(4)
    assert values(pickle.loads(pickle.dumps(ds)).subset([20, 3])) == [20, 3]
    s3.put_objects("tars", {"in/s-00.tar": shard(50, 3)})
    assert values(TarDatastore(url).subset([2, 3])) == [52, 7]
    with raises(SampleError, "s-00.tar", reason="changed"):
        ds[0]


def test_tars_can_be_named_by_pattern(tmp_path: Path) -> None:
    for name in ("a-08", "a-09", "a-10", "b-08"):
        (tmp_path / f"{name}.tar").write_bytes(shard(int(name[2:]), 1))
    url = f"{tmp_path}/"
    assert values(TarDatastore(tmp_path)) == values(TarDatastore(url)) == [8, 9, 10, 8]  # type: ignore[arg-type]
    assert values(TarDatastore(f"{url}a-09.tar")) == [9]
    assert values(TarDatastore(f"{url}a-*.tar")) == [8, 9, 10]
    with raises(DataNotFoundError, " c-*.tar", kind="nothing"):
        TarDatastore(f"{url}c-*.tar")


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_are_grouped_as_webdataset_groups_them(format: int) -> None:
    members = [("__index__", b"x"), ("README", b"x"), ("._a.png", b"x")]
    members += [("a.cls", b"cat\n"), ("a.PNG", image_file(1)), ("a.json", b"{}")]
    members += [("b.c/1.png", image_file(2)), ("b.c/1.cls", b"dog"), ("text.txt", b"no image")]
    long = "deep/" * 18 + "name"
    members += [(f"{long}.png", image_file(3)), (f"{long}.cls", b"cat")]
    # Not beside the other a: a sample of its own.
    members += [("a.png", image_file(4)), ("a.cls", b"dog")]
    ds = in_memory("grouped", tar_file(members, format))
    assert (values(ds), ds.labels.tolist()) == ([1, 2, 3, 4], [0, 1, 0, 1])


def test_labels_from_folders_and_functions() -> None:
    data = tar_file({"x/1.png": image_file(1), "y/2.png": image_file(2), "y/2.cls": b"other"})
    assert in_memory("labels", data, labels="foldernames").classes == ["x", "y"]
    ds = in_memory("labels", data, labels=lambda url: url[len("memory://labels/0.tar/") :])
    assert ds.classes == ["x/1.png", "y/2.png"]
    with raises(DataError, "labels=", kind="no label", url="memory://labels/0.tar/x/1.png"):
        in_memory("labels", data)
    with raises(OptionsError, "'.json:kind'"):
        in_memory("labels", data, labels=".json:kind")


def test_a_sample_has_one_image() -> None:
    data = tar_file({"1.left.png": image_file(1), "1.right.png": image_file(2), "1.cls": b"a"})
    with raises(DataError, "1.left.png", "1.right.png", kind="several images"):
        in_memory("two", data)
    assert values(in_memory("two", data, extensions=[".right.png"])) == [2]
    with raises(DataNotFoundError, " .jpg", kind="nothing"):
        in_memory("two", data, extensions=[".jpg"])


def test_damaged_cut_and_compressed_tars_are_named() -> None:
    whole = shard(0, 4)
    at = whole.index(b"0002.png") + 100
    damaged = whole[:at] + b"x" + whole[at + 1 :]
    for data in (whole[:1600], whole[:at], damaged, b"no tar" * 100, b"\x1f\x8b" + bytes(600)):
        with raises(DataError, kind="no tar", url="memory://broken/0.tar"):
            in_memory("broken", data)
    without_end = whole[: len(whole.rstrip(b"\0")) + 511 & ~511]
    assert values(in_memory("headers", without_end)) == [0, 1, 2, 3]


HOSTILE = {  # what follows a good sample, and what the error shows
    "a size below zero": (member("2.png", size=negative(512)), " at byte 2,048"),
    "a long name of such a size": (member("2.png", kind=b"L", size=negative(512)), " -512 bytes"),
    "a long header": (member("p", b"1" * (1 << 20), b"x"), " 1,048,576 bytes"),
    "sparse": (member("p", record("GNU.sparse.map", "0,x"), b"x") + member("2.png"), ""),
    "a long label": (
        member("2.png", image_file()) + member("2.cls", bytes(1 << 25)),
        " 33,554,432 bytes",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_tar_is_refused_in_one_sentence(case: str) -> None:
    tar, shown = HOSTILE[case]
    whole = member("1.png", image_file()) + member("1.cls", b"a") + tar + bytes(1024)
    with raises(DataError, shown, kind="no tar", url="memory://hostile/0.tar"):
        in_memory("hostile", whole)
