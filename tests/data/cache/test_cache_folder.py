"""The folder for what can be made again is there, and private."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gpupool.core.errors import DataError
from gpupool.data.cache.cache_folder import cache_folder, private_folder
from tests.support.raising import raises


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_is_made_where_the_user_wants_it_and_for_the_user_alone(tmp_path: Path) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path)
    folder = cache_folder("objects")
    assert folder == cache_folder("objects") == tmp_path / "gpupool" / "objects"
    assert (mode(folder), mode(folder.parent)) == (0o700, 0o700)


@pytest.mark.parametrize("told", ["", "relative/path"])
def test_it_is_below_home_by_default(told: str, tmp_path: Path) -> None:
    os.environ.update(XDG_CACHE_HOME=told, HOME=str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "gpupool"


def test_a_folder_that_others_could_read_is_closed(tmp_path: Path) -> None:
    tmp_path.joinpath("open").mkdir(mode=0o755)
    assert mode(private_folder(tmp_path / "open")) == 0o700


def test_a_link_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with raises(DataError, "link", kind="no folder"):
        private_folder(tmp_path / "link")
    (tmp_path / "file").write_text("")
    with raises(DataError, "file ", "File exists", kind="cannot make"):
        private_folder(tmp_path / "file")
