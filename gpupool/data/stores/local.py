"""Lists a folder of a disk, and the folders that links in it lead to. Runs anywhere; no torch.

fsspec enters no link to a folder, and says nothing about folders that it may not read.
"""

from __future__ import annotations

import os
import stat

from gpupool.core.errors import DataError
from gpupool.core.terminal import without_controls
from gpupool.data.stores.interface import FileInfo


def find_local(root: str) -> tuple[list[FileInfo], list[str]]:
    """All files below `root` at any depth, and the names of its sub-folders; none that is hidden.

    A link back to a folder that it lies in is not entered again.

    Raises DataError for what can be neither read nor entered.
    """
    files: list[FileInfo] = []
    folders: list[str] = []
    todo: list[tuple[str, list[os.stat_result]]] = [("", [])]  # with the folders it lies in
    while todo:
        path, above = todo.pop()
        full = os.path.join(root, path)
        try:
            status = os.stat(full)
            if stat.S_ISREG(status.st_mode):
                files.append(FileInfo(path, status.st_size, ""))
            elif not any(os.path.samestat(status, one) for one in above):
                inside = [*above, status]
                names = [name for name in os.listdir(full) if not name.startswith(".")]
                todo += [(os.path.join(path, name), inside) for name in names]
                folders += [path] if path and "/" not in path else []
        except OSError as error:
            is_link = os.path.islink(full)
            if is_link and os.path.splitext(path)[1]:
                files.append(FileInfo(path, 0, ""))  # reading it says that it is missing
            elif is_link or os.path.lexists(full):  # else it was there a moment ago
                shown = without_controls(full)
                what = f"{shown} cannot be listed ({error.strerror}); remove it"
                raise DataError(what, "unreadable", url=shown) from None
    return files, folders
