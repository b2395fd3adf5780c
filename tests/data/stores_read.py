"""Reads many files at once, as the loader does; settings for botocore in a file."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpupool.data.stores.folder import Folder
from gpupool.data.stores.interface import FileRef


def read_many(folder: Folder, paths: Sequence[str]) -> list[bytes]:
    """Whole files, in the order of `paths`, in 64 threads."""
    with ThreadPoolExecutor(64) as pool:
        return list(pool.map(lambda path: folder.read(FileRef(path, 0)), paths))


def profile(folder: Path, text: str) -> dict[str, str]:
    """The variable that makes botocore read `text` as its configuration."""
    (folder / "config").write_text(text)
    return {"AWS_CONFIG_FILE": str(folder / "config")}
