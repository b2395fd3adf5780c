"""Folders in whose place no other user can put his own. Runs anywhere."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import tempfile
from pathlib import Path

from gpupool.core.errors import PoolStartError

_ROOM_BYTES = 8 << 30  # for the networks of trainings


def private_temporary(prefix: str) -> Path:
    """A new folder for temporary files that its owner alone may enter (mode 0700).

    Raises PoolStartError where another user could put a folder of his in its place.
    """
    place = temporary_places()[-1]
    if reason := open_to_others(place):
        raise PoolStartError(
            f"{reason}, so the pool's files are not safe there; set TMPDIR to a folder of yours "
            "before the notebook's kernel starts",
            "unsafe folder",
        )
    return Path(tempfile.mkdtemp(prefix=prefix, dir=place))


def temporary_places() -> list[Path]:
    """Where folders of pools may lie; a new one is made in the last of these.

    That is `XDG_RUNTIME_DIR`, which no cleaner of old files visits, if it is this user's alone and
    has as much room as the folder for temporary files, or enough.
    """
    temporary, runtime = Path(tempfile.gettempdir()), os.environ.get("XDG_RUNTIME_DIR", "")
    try:
        found = os.stat(runtime)
        is_ours = found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700
        wanted = min(_free_bytes(temporary), _ROOM_BYTES)
        if os.path.isabs(runtime) and is_ours and _free_bytes(Path(runtime)) >= wanted:
            runtime.encode()  # else torch opens no files below it: see `pool/launchers/starter.py`
            return [temporary, *([Path(runtime)] if not open_to_others(Path(runtime)) else [])]
    except (OSError, ValueError):  # it is not there, or no name that can be used
        pass
    return [temporary]


def _free_bytes(folder: Path) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def open_to_others(folder: Path) -> str:
    """Why another user could put what is his in the place of what lies in `folder`; "" if nobody.

    As for sshd, the folder and all above it must belong to this user or to root, and others may
    not write to them, unless they are sticky. What is not there yet counts for nothing.
    """
    place = folder.resolve()
    for above in (place, *place.parents):
        try:
            found = above.stat()
        except FileNotFoundError:
            continue
        if found.st_uid not in (0, os.geteuid()) and _has_name_here(found.st_uid):
            return f"{above} belongs to another user ({found.st_uid})"
        by_group = found.st_mode & stat.S_IWGRP and not _is_ours_alone(found.st_gid)
        if (by_group or found.st_mode & stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
            mode = stat.S_IMODE(found.st_mode)
            return f"others may rename what is in {above} (mode {mode:04o}, not sticky)"
    return ""


def _has_name_here(uid: int) -> bool:
    """Whether this user id is one; a container shows owners from outside of it as "nobody"."""
    ranges = [
        map(int, line.split()) for line in Path("/proc/self/uid_map").read_text().splitlines()
    ]
    return any(first <= uid < first + count for first, _, count in ranges)


def _is_ours_alone(gid: int) -> bool:
    """Whether a group is root's, or has no other member than this user.

    That is known if it is called like the user, as Linux makes them, or if the users are listed: a
    directory service may not list them, and then not even this one.
    """
    if gid == 0:
        return True
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    if user.pw_gid != gid or {*group.gr_mem} - {user.pw_name}:
        return False
    return group.gr_name == user.pw_name or [
        one.pw_name for one in pwd.getpwall() if one.pw_gid == gid
    ] == [user.pw_name]
