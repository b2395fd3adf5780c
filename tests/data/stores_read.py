"""Reads many files at once, as the loader does; settings for botocore in a file; a slow store."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpupool.core import progress
from gpupool.core.progress import Course
from gpupool.data.stores.folder import Folder
from gpupool.data.stores.interface import FileRef
from tests.servers.slow_s3 import SlowS3


def read_many(folder: Folder, paths: Sequence[str]) -> list[bytes]:
    """Whole files, in the order of `paths`, in 64 threads."""
    with ThreadPoolExecutor(64) as pool:
        return list(pool.map(lambda path: folder.read(FileRef(path, 0)), paths))


def profile(folder: Path, text: str) -> dict[str, str]:
    """The variable that makes botocore read `text` as its configuration."""
    (folder / "config").write_text(text)
    return {"AWS_CONFIG_FILE": str(folder / "config")}


def answer_when_drawn(slow: SlowS3, drawn: list[Course]) -> None:
    """Nothing comes through `slow` until something is drawn, from now on into `drawn`."""

    def draw(course: Course) -> None:
        drawn.append(course)
        os.kill(slow.pid, signal.SIGCONT)

    progress.draw_with(lambda course: draw)
    os.kill(slow.pid, signal.SIGSTOP)
