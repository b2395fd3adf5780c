"""What this process may use: affinity mask, and the quotas and limits of its cgroups."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpupool.core.machine.limits import cpu_quota, memory_limit, num_usable_cores


class System:
    """A /proc and a /sys/fs/cgroup as the kernel writes them."""

    def __init__(self, folder: Path, own: str, **files: str) -> None:
        """`own` is the text of /proc/self/cgroup; `files` are cgroups', "__" means "/"."""
        self.places = folder / "proc", folder / "cgroup"
        content = {"proc/self/cgroup": own}
        content |= {f"cgroup/{name.replace('__', '/')}": text for name, text in files.items()}
        for name, text in content.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


def test_without_cgroups_there_is_no_limit(tmp_path: Path) -> None:
    places = System(tmp_path, "").places
    assert (cpu_quota(*places), memory_limit(*places)) == (math.inf, 0)


def test_no_limit_is_written_max_or_minus_one_or_a_huge_number(tmp_path: Path) -> None:
    places = System(tmp_path, "0::/\n", **{"cpu.max": "max 100000\n", "memory.max": "max"}).places
    assert (cpu_quota(*places), memory_limit(*places)) == (math.inf, 0)
    files = {
        "cpu__cpu.cfs_quota_us": "-1",
        "cpu__cpu.cfs_period_us": "100000",
        "memory__memory.limit_in_bytes": str(0x7FFFFFFFFFFFF000),
    }
    places = System(tmp_path, "4:cpu,cpuacct:/\n5:memory:/\n", **files).places
    assert (cpu_quota(*places), memory_limit(*places)) == (math.inf, 0)


def test_the_smallest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {
        "job__cpu.max": "250000 100000",
        "job__step__cpu.max": "400000 100000",
        "other__cpu.max": "100000 100000",
        "job__memory.max": "1024",
        "job__step__memory.max": "max",
    }
    places = System(tmp_path, "0::/job/step\n", **files).places
    assert (cpu_quota(*places), memory_limit(*places)) == (2.5, 1024)
    assert num_usable_cores(*places) == min(2, num_usable_cores())


@pytest.mark.parametrize("own", ["/docker/abc", "/"])
def test_version_1_in_a_container_that_is_told_the_hosts_paths(tmp_path: Path, own: str) -> None:
    files = {
        "cpu__cpu.cfs_quota_us": "50000",
        "cpu__cpu.cfs_period_us": "100000",
        "memory__memory.limit_in_bytes": "1024",
    }
    places = System(tmp_path, f"5:memory:{own}\n4:cpu,cpuacct:{own}\n0::/\n", **files).places
    assert (cpu_quota(*places), memory_limit(*places)) == (0.5, 1024)
    assert num_usable_cores(*places) == 1


def test_the_affinity_mask_counts() -> None:
    assert 1 <= num_usable_cores() <= (os.cpu_count() or 1)
    code = (
        "import os\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from gpupool.core.machine.limits import num_usable_cores\n"
        "print(num_usable_cores())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "1"
