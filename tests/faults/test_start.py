"""A start that cannot succeed says why and leaves nothing; one that can is not disturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import gone, until

START = """
import json, sys, tempfile
import gpupool
tempfile.gettempdir()  # a folder that can be written to at this moment
{first}
try:
    with gpupool.start(n=2, device="cpu") as pool:
        print(json.dumps(dict(pool.run("x = torch.ones(1); dist.all_reduce(x); x.item()"))))
        {then}
except gpupool.GpuPoolError as error:
    print(json.dumps({{"kind": type(error).__name__, "text": str(error)}}))
import psutil
print(json.dumps([child.pid for child in psutil.Process().children(recursive=True)]))
"""


# a write that does not fit is cut short, so that no byte is left free
FILL = "open(tempfile.gettempdir() + '/filler', 'wb', 0).write(b'x' * (1 << 20))"


def start(folder: Path, *prefix: str, first: str = "", then: str = "pass") -> list[Any]:
    """What a notebook of its own, with its temporary files in `folder`, has to tell."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", START.format(first=first, then=then)],
        env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs to mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def refused(folder: Path, *prefix: str, first: str = "") -> str:
    """Why it does not start; nothing is left running."""
    told, left = start(folder, *prefix, first=first)
    assert told["kind"] == "PoolStartError"
    until(lambda: gone(*left), 3.0)
    return str(told["text"])


def test_a_full_disk_is_named_and_nothing_is_left(small_disk: Path) -> None:
    said = refused(small_disk, first=FILL)
    assert "No space left on device" in said
    assert "othing was left running" in said
    until(lambda: [p.name for p in small_disk.iterdir()] == ["filler"], 3.0)


def test_a_torch_that_cannot_be_imported_is_the_reason_given(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text("raise ImportError('libcudart.so.99: cannot open')")
    said = refused(tmp_path, "env", f"PYTHONPATH={broken}:{Path.cwd()}")
    assert "the starter of the pool ended with exit status 1" in said
    assert "ImportError: libcudart.so.99: cannot open" in said


def test_a_child_that_the_notebook_forks_ends_no_pool(tmp_path: Path) -> None:
    fork = "import os; sys.stdout.flush(); os.fork() or sys.exit(); os.wait()"
    _, found, _ = start(tmp_path, then=f"{fork}; print(json.dumps(pool.run('rank')[1]))")
    assert found == 1


@pytest.mark.long
def test_a_crash_leaves_no_memory_on_the_disk(tmp_path: Path) -> None:
    """A core of more than a byte is written for no rank, whatever the shell's limit is."""
    ask = "import resource; resource.getrlimit(resource.RLIMIT_CORE)[0]"
    then = f"print(json.dumps(pool.run({ask!r}, ranks=0)[0]))"
    _, most, _ = start(tmp_path, "sh", "-c", 'ulimit -S -c unlimited; exec "$@"', "sh", then=then)
    assert most in (0, 1)
