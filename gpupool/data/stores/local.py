"""Lists a folder of a disk, and the folders that links in it lead to. Runs anywhere; no torch.

fsspec enters no link to a folder, and says nothing about folders that it may not read.
"""

from __future__ import annotations

import os
import stat

from gpupool.core.errors import DataError
from gpupool.core.terminal import without_controls
from gpupool.data.stores.interface import FileInfo

_Place = tuple[int, int]  # of a folder on its disk: two names of one folder have the same


def find_local(root: str) -> tuple[list[FileInfo], list[str]]:
    """All files below `root` at any depth, and the names of its sub-folders; none that is hidden.

    A link back to a folder that it lies in is not entered again.

    Raises DataError for what can be neither read nor entered.
    """
    files: list[FileInfo] = []
    folders: list[str] = []
    todo: list[tuple[str, tuple[_Place, ...]]] = [("", ())]
    while todo:
        path, above = todo.pop()
        folder = os.path.join(root, path)
        try:
            status = os.stat(folder)
            here = (status.st_dev, status.st_ino)
            names = os.listdir(folder) if here not in above else []
        except OSError as error:
            raise _unreadable(folder, str(error.strerror)) from None
        for name in names:
            below, full = os.path.join(path, name), os.path.join(folder, name)
            if name.startswith("."):
                continue
            try:
                status = os.stat(full)
            except OSError as error:
                if os.path.islink(full) and os.path.splitext(name)[1]:
                    files.append(FileInfo(below, 0, ""))  # reading it says that it is missing
                elif os.path.lexists(full):  # else it was there a moment ago
                    raise _unreadable(full, str(error.strerror)) from None
                continue
            if stat.S_ISDIR(status.st_mode):
                todo.append((below, (*above, here)))
                folders += [] if path else [name]
            elif stat.S_ISREG(status.st_mode):
                files.append(FileInfo(below, status.st_size, ""))
            else:
                raise _unreadable(full, "neither a file nor a folder")
    return files, folders


def _unreadable(path: str, why: str) -> DataError:
    shown = without_controls(path)
    return DataError(
        f"{shown} cannot be listed ({why}); remove it, or give another folder",
        "unreadable",
        url=shown,
    )
