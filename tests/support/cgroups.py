"""Control groups with a limit of their own, where the machine lets one make them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.processes import until


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """The folder of a control group for `limit_bytes` of memory; skips where none can be made.

    A process joins it by writing 0 into its file `cgroup.procs`, with all that it starts from then
    on. At the end it waits until all of them have ended.
    """
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    parent, limit = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v2, "memory.max")
    folder = parent / f"gpupool-test-{uuid4().hex}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(limit_bytes))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"no control group with a limit of its memory can be made here: {error}")
    try:
        yield folder
    finally:
        until(lambda: not (folder / "cgroup.procs").read_text(), 20.0, "the end of its processes")
        folder.rmdir()
