"""Reading through the cache of a host: once from the store, then from the disk."""

from __future__ import annotations

import functools
import os
import pickle
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from gpupool import ImageDatastore, TarDatastore
from gpupool.core.errors import DataError, OptionsError, SampleError
from gpupool.data.cache.cache import Cached, DiskCache
from gpupool.data.stores.folder import Folder
from gpupool.data.stores.interface import FileRef
from gpupool.data.stores.retry import counts
from tests.data.datastores.test_tar import shard
from tests.servers.s3 import SeaweedServer
from tests.servers.slow_s3 import SlowS3
from tests.support.raising import raises

NUM_OBJECTS = 40
OBJECTS = {f"in/{n:02}.bin": n.to_bytes(2, "little") * (1000 + 100 * n) for n in range(NUM_OBJECTS)}


@pytest.fixture(scope="module")
def bucket(s3: SeaweedServer) -> str:
    url = s3.make_bucket("cached")
    s3.put_objects("cached", OBJECTS)
    return url


@pytest.fixture
def folder(s3: SeaweedServer, bucket: str) -> Folder:
    os.environ.update(s3.env)
    return Folder(f"{bucket}/in")


@pytest.fixture
def files(folder: Folder) -> list[FileRef]:
    return [file.ref for file in folder.list_files().files]


def cached(folder: Folder, place: Path) -> Cached:
    return Cached(folder, limit_gib=1, folder=str(place))


def read_counting(source: Cached, files: list[FileRef]) -> tuple[int, int]:
    """Reads all; how many came from the store, and from the disk."""
    before = counts.snapshot()
    for file in files:
        assert source.read(file) == OBJECTS[f"in/{file.path}"]
    done = counts.snapshot() - before
    return done.reads, done.cached_reads


def test_the_second_time_it_comes_from_the_disk(
    folder: Folder, files: list[FileRef], tmp_path: Path
) -> None:
    source = cached(folder, tmp_path)
    assert read_counting(source, files[:10]) == (10, 0)
    assert read_counting(source, files) == (30, 10)
    assert read_counting(source, files) == (0, 40)
    assert (source.shown_url, source.name("a")) == (folder.shown_url, folder.name("a"))


def test_a_second_epoch_needs_no_network(folder: Folder, s3: SeaweedServer, tmp_path: Path) -> None:
    source = cached(folder, tmp_path)
    with SlowS3(s3.endpoint) as network:
        os.environ["AWS_ENDPOINT_URL"] = network.endpoint
        files = [file.ref for file in folder.list_files().files]
        network.stats()
        assert read_counting(source, files) == (40, 0)
        assert network.stats()["requests"] == 40
    # now nobody listens there
    assert read_counting(source, files) == (0, 40)


def test_a_changed_object_is_read_anew_and_ranges_are_kept_apart(
    folder: Folder, s3: SeaweedServer, tmp_path: Path
) -> None:
    source = cached(Folder(folder.url.replace("/in", "/changes")), tmp_path)
    for content in (b"first", b"other"):  # of the same size
        s3.put_objects("cached", {"changes/1": content})
        (info,) = source.source.list_files().files  # type: ignore[attr-defined]
        for _ in range(2):
            assert source.read(info.ref) == content
            assert source.read(info.ref, 1, 3) == content[1:4]
            assert source.read(info.ref, 3) == content[3:]


def test_files_without_a_version_are_always_read(tmp_path: Path) -> None:
    (tmp_path / "1").write_bytes(b"one")
    source = cached(Folder(str(tmp_path)), tmp_path / "cache")
    file = FileRef("1", 3)
    assert source.read(file) == b"one"
    (tmp_path / "1").write_bytes(b"two")
    assert source.read(file) == b"two"


def test_after_an_error_the_next_try_reads_again(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)

    def fail() -> bytes:
        raise SampleError("s3://b/1 does not exist", "s3://b/1", "missing")

    for _ in range(2):
        with raises(SampleError, url="s3://b/1"):
            cache.read("in/1", fail, 2**30)
    assert cache.read("in/1", lambda: b"now", 2**30) == b"now"


def test_a_cache_that_cannot_be_read_is_said_once_and_reading_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    cache = DiskCache(folder)
    assert cache.read("in/1", lambda: b"one", 2**30) == b"one"
    shutil.rmtree(folder)
    folder.write_text("no folder")
    with caplog.at_level("WARNING", "gpupool"):
        for number in (1, 2, 1):
            assert cache.read(f"in/{number}", lambda: b"again", 2**30) == b"again"
    ours = [record for record in caplog.records if record.name == "gpupool"]
    assert (len(ours), cache.stopped) == (1, "Not a directory")


@pytest.mark.parametrize("damaged", [b"", b"cut", bytes(8) + b"content"])
def test_a_damaged_file_is_replaced(damaged: bytes, tmp_path: Path) -> None:
    read = functools.partial(DiskCache(tmp_path).read, "in/1", limit=2**30)
    assert read(lambda: b"content") == b"content"
    (tmp_path / "in" / "1").write_bytes(damaged)
    assert [read(lambda: b"content"), read(lambda: b"other")] == [b"content"] * 2


def fill(folder: Path, source: str, limit: int) -> int:
    """Reads 32 contents of a MiB; how many of them are kept by then."""
    cache = DiskCache(folder)
    for number in range(32):
        assert cache.read(f"{source}/{number}", lambda: bytes(1 << 20), limit) == bytes(1 << 20)
    return len(list(folder.glob(f"{source}/[0-9]*")))


def test_all_of_it_together_keeps_to_the_limit(tmp_path: Path) -> None:
    limit = 16 << 20
    assert [fill(tmp_path, source, limit) for source in "ab"] == [15, 0]
    files = (path for path in tmp_path.rglob("*") if path.is_file())
    assert sum(file.stat().st_blocks * 512 for file in files) <= limit


def test_what_nobody_reads_makes_room_and_what_is_in_use_stays(tmp_path: Path) -> None:
    limit = 48 << 20
    assert [fill(tmp_path, source, limit) for source in "ab"] == [32, 15]
    os.utime(tmp_path / "b", (0, 0))
    assert fill(tmp_path, "b", limit) == 15  # it was idle: now it is read
    os.utime(tmp_path / "a", (0, 0))
    assert fill(tmp_path, "c", limit) == 32
    assert not (tmp_path / "a").exists()


def test_it_is_private_and_holds_no_names(
    folder: Folder, files: list[FileRef], s3: SeaweedServer, tmp_path: Path
) -> None:
    source = cached(folder, tmp_path)
    read_counting(source, files)
    everything = [tmp_path, *tmp_path.rglob("*")]
    modes = {stat.S_IMODE(path.stat().st_mode) for path in everything[1:]}
    assert modes == {0o700, 0o600}
    shown = repr(source) + pickle.dumps(source).hex() + "".join(map(str, everything))
    for secret in (s3.env["AWS_SECRET_ACCESS_KEY"], s3.env["AWS_ACCESS_KEY_ID"]):
        assert secret not in shown
        assert secret.encode().hex() not in shown


def test_somebody_may_remove_it_all_at_any_time(
    folder: Folder, files: list[FileRef], tmp_path: Path
) -> None:
    source = cached(folder, tmp_path)
    read_counting(source, files)
    subprocess.run(["rm", "-r", *tmp_path.iterdir()], check=True)
    assert read_counting(source, files) == (40, 0)
    assert read_counting(source, files) == (0, 40)


def test_a_datastore_can_be_cached(photos_url: str, s3: SeaweedServer, tmp_path: Path) -> None:
    os.environ.update(s3.env)
    ds = ImageDatastore(f"{photos_url}/test").with_transform(len)
    cached = ds.cached(limit_gib=1, folder=str(tmp_path))
    assert (cached.paths, cached.url, cached.transform) == (ds.paths, ds.url, len)
    before = counts.snapshot()
    for part in (
        cached.subset(range(50)),
        pickle.loads(pickle.dumps(cached.subset(range(1, 100, 2)))),
    ):
        part.__getitems__(range(50))
    done = counts.snapshot() - before
    assert (done.reads, done.cached_reads) == (75, 25)
    again = cached.cached(limit_gib=2, folder=str(tmp_path))
    assert again.sources == (Cached(Folder(f"{photos_url}/test"), 2, str(tmp_path)),)


def test_members_of_tars_are_cached_one_by_one(s3: SeaweedServer, tmp_path: Path) -> None:
    os.environ.update(s3.env, XDG_CACHE_HOME=str(tmp_path))
    url = s3.make_bucket("cached-tars")
    s3.put_objects("cached-tars", {f"{i}.tar": shard(5 * i, 5) for i in range(2)})
    ds = TarDatastore(url).cached(limit_gib=1, folder=str(tmp_path))
    for expected in ((4, 0), (0, 4)):
        before = counts.snapshot()
        ds.subset([0, 3, 5, 8]).__getitems__(range(4))
        done = counts.snapshot() - before
        assert (done.reads, done.cached_reads) == expected


def test_a_store_without_versions_cannot_be_cached(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(b"")
    with raises(OptionsError, "(ETags)"):
        ImageDatastore(str(tmp_path)).cached(limit_gib=1, folder=str(tmp_path))


def test_impossible_arguments_say_what_to_give(tmp_path: Path) -> None:
    for limit in (0, -1, float("nan"), float("inf")):
        with raises(OptionsError, "limit_gib"):
            Cached(Folder("s3://none"), limit)
    (tmp_path / "file").write_text("")
    with raises(DataError, kind="cannot make"):
        Cached(Folder("s3://none"), 1, str(tmp_path / "file")).open()
    assert Cached(Folder("s3://none"), 1, "x").folder == os.path.abspath("x")
