"""Folders in whose place another user could put his own are told from safe ones."""

from __future__ import annotations

import grp
import os
import pwd
import tempfile
from pathlib import Path

import pytest

from gpupool.core.machine.private_folders import (
    open_to_others,
    private_temporary,
    temporary_places,
)

STRANGER = 54321


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "shared" / "mine").mkdir(parents=True)
    return tmp_path / "shared"


@pytest.mark.parametrize("below", ["", "mine/not/there/yet"])
@pytest.mark.parametrize(
    ("mode", "is_open"),
    [
        (0o700, False),
        (0o1777, False),
        (0o777, True),
    ],
)
def test_others_may_write_to_no_folder_above_unless_it_is_sticky(
    place: Path, mode: int, is_open: bool, below: str
) -> None:
    place.chmod(mode)
    reason = f"others may rename what is in {place} (mode {mode:04o}, not sticky)"
    assert open_to_others(place / below) == (reason if is_open else "")


def test_a_link_is_followed(place: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(place)
    assert open_to_others(tmp_path / "link" / "mine") == ""
    place.chmod(0o777)
    assert str(place) in open_to_others(tmp_path / "link" / "mine")


def test_the_group_of_the_user_alone_may_write_and_others_may_not(place: Path) -> None:
    place.chmod(0o2775)
    own = os.getgid()
    is_alone = own == 0 or (
        grp.getgrgid(own).gr_name == pwd.getpwuid(os.getuid()).pw_name
        and not grp.getgrgid(own).gr_mem
    )
    if not is_alone:
        pytest.skip(f"group {own} of this user has other members")
    assert open_to_others(place) == ""


def as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give folders to other users")


def test_a_group_with_other_members_may_not_write(place: Path) -> None:
    as_root()
    place.chmod(0o2775)
    crowd = next(group.gr_gid for group in grp.getgrall() if group.gr_gid not in (0, os.getgid()))
    os.chown(place, -1, crowd)
    assert "others may rename what is in" in open_to_others(place)
    os.chown(place, -1, STRANGER)  # of nobody that is known
    assert "others may rename what is in" in open_to_others(place)


def test_a_folder_of_another_user_is_his_even_if_it_is_sticky(place: Path) -> None:
    as_root()
    for mode in (0o755, 0o1777):
        place.chmod(mode)
        os.chown(place, STRANGER, -1)
        assert open_to_others(place / "mine") == f"{place} belongs to another user ({STRANGER})"


def test_a_pools_folder_is_where_no_cleaner_goes_if_that_is_the_users_alone(tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    os.environ["XDG_RUNTIME_DIR"] = str(runtime)
    made = private_temporary("gpupool-")
    assert (made.parent, made.stat().st_mode & 0o777) == (runtime, 0o700)
    assert runtime in temporary_places()
    made.rmdir()
    runtime.chmod(0o750)
    assert temporary_places() == [Path(tempfile.gettempdir())]
    runtime.chmod(0o700)
    for unusable in ("runtime", str(tmp_path / "none"), str(tmp_path / "\udcff"), ""):
        os.environ["XDG_RUNTIME_DIR"] = unusable
        assert temporary_places() == [Path(tempfile.gettempdir())]
    if os.getuid() == 0:
        os.chown(runtime, STRANGER, -1)
        os.environ["XDG_RUNTIME_DIR"] = str(runtime)
        assert temporary_places() == [Path(tempfile.gettempdir())]
