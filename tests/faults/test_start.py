"""A start that cannot succeed says why and leaves nothing; one that can is not disturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import gone, until

START = """
import json, sys, tempfile
import gpupool
tempfile.gettempdir()  # a folder that can be written to at this moment
{first}
try:
    with gpupool.start(n=2, device="cpu", timeout_s={timeout_s}) as pool:
        print(json.dumps(dict(pool.run("x = torch.ones(1); dist.all_reduce(x); x.item()"))))
        {then}
except gpupool.GpuPoolError as error:
    print(json.dumps({{"kind": type(error).__name__, "text": str(error)}}))
import psutil
print(json.dumps([child.pid for child in psutil.Process().children(recursive=True)]))
"""


# a write that does not fit is cut short, so that no byte is left free
FILL = "open(tempfile.gettempdir() + '/filler', 'wb', 0).write(b'x' * (1 << 20))"


def start(
    folder: Path, *prefix: str, first: str = "", then: str = "pass", timeout_s: float = 60
) -> list[object]:
    """What a notebook of its own, with its temporary files in `folder`, has to tell."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", START.format(first=first, then=then, timeout_s=timeout_s)],
        env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB, mounted for one test."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs to mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_full_disk_is_named_and_nothing_is_left(small_disk: Path) -> None:
    told, left = start(small_disk, first=FILL)
    assert isinstance(told, dict)
    assert told["kind"] == "PoolStartError"
    assert "No space left on device" in told["text"]
    assert "othing was left running" in told["text"]
    assert isinstance(left, list)
    until(lambda: gone(*left), 3.0)
    until(lambda: [p.name for p in small_disk.iterdir()] == ["filler"], 3.0)


def test_a_torch_that_cannot_be_imported_is_the_reason_given(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text("raise ImportError('libcudart.so.99: cannot open')")
    told, left = start(tmp_path, "env", f"PYTHONPATH={broken}:{Path.cwd()}")
    assert isinstance(told, dict)
    assert told["kind"] == "PoolStartError"
    assert "the starter of the pool ended with exit status 1" in told["text"]
    assert "ImportError: libcudart.so.99: cannot open" in told["text"]
    assert isinstance(left, list)
    until(lambda: gone(*left), 3.0)


@pytest.mark.long
def test_a_crash_leaves_no_memory_on_the_disk_unless_a_cell_asks_for_it(tmp_path: Path) -> None:
    """A child of a rank has the rank's limit; that a core is left otherwise is seen there too."""
    crash = f"""
        import os, resource
        def leaves_core(limit):
            child = os.fork()
            if child == 0:
                os.chdir({str(tmp_path)!r})
                if limit is not None:
                    resource.setrlimit(resource.RLIMIT_CORE, limit)
                os.abort()
            return os.WCOREDUMP(os.waitpid(child, 0)[1])
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        leaves_core(None), leaves_core((hard, hard))
    """
    then = f"print(json.dumps(pool.run({textwrap.dedent(crash)!r}, ranks=0)[0]))"
    _, found, _ = start(tmp_path, "sh", "-c", 'ulimit -S -c unlimited; exec "$@"', "sh", then=then)
    if found == [False, False]:
        pytest.skip("needs a kernel that writes cores: ulimit -Hc, /proc/sys/kernel/core_pattern")
    assert found == [False, True]
