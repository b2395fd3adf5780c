"""Reading through the cache of a host: once from the store, then from the disk."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import NamedTuple

import fsspec
import pytest

from gpupool import ImageDatastore
from gpupool.core.errors import DataError, MissingSampleError, OptionsError
from gpupool.data.stores.cache import Cache, cache_folder, private_folder
from gpupool.data.stores.folder import FileRef, Folder
from gpupool.data.stores.retry import counts
from tests.support.raising import raises

MIB = 1 << 20


class Cached(NamedTuple):
    folder: Folder
    cache: Cache

    def read(self, file: FileRef, start: int = 0, length: int | None = None) -> bytes:
        return self.cache.read(self.folder, file, start, length)


def source(name: str, place: Path, limit_mib: float = 1024, num: int = 0) -> Cached:
    """`num` files of a MiB."""
    fsspec.filesystem("memory").pipe({f"/{name}/{one}": bytes([one]) * MIB for one in range(num)})
    return Cached(Folder(f"memory://{name}"), Cache(limit_mib / 1024, str(place)))


def put(cached: Cached, path: str, content: bytes) -> FileRef:
    fsspec.filesystem("memory").pipe(f"/{cached.folder.url[9:]}/{path}", content)
    return FileRef(path, len(content), 1 + sum(content))


def reads(cached: Cached, num: int = 32) -> tuple[int, int]:
    """Reads the files of a `source`; how many came from the store, and from the disk."""
    before = counts.snapshot()
    for one in range(num):
        assert cached.read(FileRef(str(one), MIB, 7)) == bytes([one]) * MIB
    done = counts.snapshot() - before
    return done.reads, done.cached_reads


def kept(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file() and path.name != "blocks"]


def test_the_second_time_it_comes_from_private_files_without_names(tmp_path: Path) -> None:
    cached = source("hidden-name", tmp_path, num=32)
    assert [reads(cached, 10), reads(cached), reads(cached)] == [(10, 0), (22, 10), (0, 32)]
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}
    assert "hidden" not in "".join(map(str, tmp_path.rglob("*")))
    shutil.rmtree(tmp_path / os.listdir(tmp_path)[0])  # by anybody, at any time
    assert [reads(cached), reads(cached)] == [(32, 0), (0, 32)]


def test_versions_and_ranges_are_kept_apart(tmp_path: Path) -> None:
    cached = source("apart", tmp_path)
    for content in (b"first", b"other"):  # of the same size
        file = put(cached, "1", content)
        for _ in range(2):
            assert cached.read(file) == content
            assert cached.read(file, 1, 3) == content[1:4]
            assert cached.read(file, 3) == content[3:]
    put(cached, "1", b"third")
    assert cached.read(FileRef("1", 5)) == b"third"  # without a version
    with raises(MissingSampleError, reason="missing"):
        cached.read(FileRef("2", 3, 1 + sum(b"now")))
    assert cached.read(put(cached, "2", b"now")) == b"now"


def test_a_damaged_file_is_replaced(tmp_path: Path) -> None:
    cached = source("damaged", tmp_path)
    file = put(cached, "1", b"content")
    for damaged in (b"", b"cut", bytes(8) + b"content", b""):
        assert cached.read(file) == b"content"
        (path,) = kept(tmp_path)
        path.write_bytes(damaged)


def test_what_fails_is_said_once_and_reading_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cached = source("fails", tmp_path, num=3)
    place = cached.cache.open(cached.folder)
    place.rmdir()
    place.write_text("no folder")
    with caplog.at_level("WARNING", "gpupool"):
        assert reads(cached, 3) == (3, 0)
    said = [record.getMessage() for record in caplog.records]
    assert 0 < len(said) == len({*said})


def test_it_keeps_to_the_limit_and_the_oldest_make_room_when_it_is_opened(tmp_path: Path) -> None:
    a, b = (source(name, tmp_path, 48, 32) for name in "ab")
    assert reads(a) == (32, 0)
    for path in kept(tmp_path):
        os.utime(path, (0, 0))
    assert [reads(b), reads(b)] == [(32, 0), (17, 15)]
    assert sum(path.stat().st_blocks * 512 for path in kept(tmp_path)) <= 48 * MIB
    c = source("c", tmp_path, 48, 24)
    assert [reads(c, 24), reads(c, 24), reads(b)] == [(24, 0), (0, 24), (17, 15)]
    assert sum(path.stat().st_blocks * 512 for path in kept(tmp_path)) <= 48 * MIB


def test_impossible_arguments_say_what_to_give(tmp_path: Path) -> None:
    for limit in (0, -1, float("nan"), float("inf")):
        with raises(OptionsError, "limit_gib"):
            Cache(limit)
    assert Cache(1, "x").folder == os.path.abspath("x")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(b"")
    with raises(OptionsError, "(ETags)"):
        ImageDatastore(str(tmp_path)).cached(limit_gib=1, folder=str(tmp_path))


# ---- its folder is there, and private ------------------------------------------------------------


def test_it_is_where_the_user_wants_it_or_below_home(tmp_path: Path) -> None:
    own = str(tmp_path / "own")
    for told, place in ((own, "own"), ("", ".cache"), ("relative/path", ".cache")):
        os.environ.update(XDG_CACHE_HOME=told, HOME=str(tmp_path))
        below = tmp_path / place / "gpupool"
        assert cache_folder("objects") == cache_folder("objects") == below / "objects"
        modes = {path.stat().st_mode & 0o777 for path in (below, below / "objects")}
        assert modes == {0o700}


def test_what_others_could_read_is_closed_and_what_may_be_theirs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    assert private_folder(tmp_path / "open").stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with raises(DataError, f"{name} ", kind="cannot make"):
            private_folder(tmp_path / name)
