"""Where gpupool keeps on this host what it can make again. Runs anywhere; no torch."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gpupool.core.errors import DataError


def cache_folder(*parts: str) -> Path:
    """`$XDG_CACHE_HOME/gpupool/<parts>` (default `~/.cache/gpupool`), made if it is not there.

    Its owner alone may enter it (mode 0700). Raises DataError if it cannot be made.
    """
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    # The standard says that a relative path is to be ignored.
    base = Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache"
    private_folder(base / "gpupool")
    return private_folder(base.joinpath("gpupool", *parts))


def private_folder(path: Path) -> Path:
    """`path`, as a folder that its owner alone may enter (mode 0700), made if it is not there.

    Raises DataError if that cannot be had: no room, no right, or another user's folder.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(0, "it is a link, or another user's")
        if stat.S_IMODE(found.st_mode) != 0o700:
            path.chmod(0o700)
    except OSError as error:
        raise DataError(
            f"{path} cannot be a private folder ({error.strerror}); give a folder of yours, or set "
            "XDG_CACHE_HOME to one, best on a local disk",
            "cannot make",
        ) from None
    return path
