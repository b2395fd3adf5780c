"""What this process may use: affinity mask, and the quotas and limits of its cgroups."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from gpupool.core.machine.limits import cpu_quota, memory_limit, num_usable_cores


def system(root: Path, own: str, **files: str) -> Path:
    """A /proc and a /sys/fs/cgroup as the kernel writes them.

    `own` is the text of /proc/self/cgroup; `files` are cgroups', "__" means "/".
    """
    content = {"proc/self/cgroup": own}
    content |= {f"sys/fs/cgroup/{name.replace('__', '/')}": text for name, text in files.items()}
    for name, text in content.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_no_limit_is_no_file_or_written_max_or_minus_one_or_a_huge_number(tmp_path: Path) -> None:
    assert (cpu_quota(tmp_path), memory_limit(tmp_path)) == (math.inf, 0)
    root = system(tmp_path, "0::/\n", **{"cpu.max": "max 100000\n", "memory.max": "max"})
    assert (cpu_quota(root), memory_limit(root)) == (math.inf, 0)
    files = {
        "cpu__cpu.cfs_quota_us": "-1",
        "cpu__cpu.cfs_period_us": "100000",
        "memory__memory.limit_in_bytes": str(0x7FFFFFFFFFFFF000),
    }
    root = system(tmp_path, "4:cpu,cpuacct:/\n5:memory:/\n", **files)
    assert (cpu_quota(root), memory_limit(root)) == (math.inf, 0)


def test_the_smallest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {
        "job__cpu.max": "250000 100000",
        "job__step__cpu.max": "400000 100000",
        "other__cpu.max": "100000 100000",
        "job__memory.max": "1024",
        "job__step__memory.max": "max",
    }
    root = system(tmp_path, "0::/job/step\n", **files)
    assert (cpu_quota(root), memory_limit(root)) == (2.5, 1024)
    assert num_usable_cores(root) == min(2, num_usable_cores())


@pytest.mark.parametrize("own", ["/docker/abc", "/"])
def test_version_1_in_a_container_that_is_told_the_hosts_paths(tmp_path: Path, own: str) -> None:
    files = {
        "cpu__cpu.cfs_quota_us": "50000",
        "cpu__cpu.cfs_period_us": "100000",
        "memory__memory.limit_in_bytes": "1024",
    }
    root = system(tmp_path, f"5:memory:{own}\n4:cpu,cpuacct:{own}\n0::/\n", **files)
    assert (cpu_quota(root), memory_limit(root)) == (0.5, 1024)
    assert num_usable_cores(root) == 1


def test_the_affinity_mask_counts() -> None:
    mask = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mask)})
    try:
        assert num_usable_cores() == 1
    finally:
        os.sched_setaffinity(0, mask)
