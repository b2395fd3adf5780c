"""The folder for what can be made again is there, and private."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpupool.core.errors import DataError
from gpupool.data.cache.cache_folder import cache_folder, private_folder
from tests.support.raising import raises


@pytest.mark.parametrize("told", ["{}/own", "", "relative/path"])
def test_it_is_where_the_user_wants_it_or_below_home(told: str, tmp_path: Path) -> None:
    os.environ.update(XDG_CACHE_HOME=told.format(tmp_path), HOME=str(tmp_path))
    below = tmp_path / ("own" if "{}" in told else ".cache") / "gpupool"
    assert cache_folder("objects") == cache_folder("objects") == below / "objects"
    assert {below.stat().st_mode & 0o777, (below / "objects").stat().st_mode & 0o777} == {0o700}


def test_what_others_could_read_is_closed_and_what_may_be_theirs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    assert private_folder(tmp_path / "open").stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with raises(DataError, f"{name} ", kind="cannot make"):
            private_folder(tmp_path / name)
