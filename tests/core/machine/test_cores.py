"""How many cores this process may use: affinity mask and cgroup quota."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpupool.core.machine.cores import cpu_quota, num_usable_cores

V2 = "30 1 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
OTHERS = (
    "23 1 8:1 / / rw - ext4 /dev/sda1 rw\n35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup x rw\n"
)


def system(root: Path, cgroup: str, mounts: str, **files: str) -> Path:
    """A folder with the files of a system; `files` are below /sys/fs/cgroup, "__" means "/"."""
    content = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": OTHERS + mounts}
    content |= {f"sys/fs/cgroup/{k.replace('__', '/')}": text for k, text in files.items()}
    for name, text in content.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_this_process_may_use_at_least_one_core() -> None:
    assert 1 <= num_usable_cores() <= (os.cpu_count() or 1)


def test_without_cgroups_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) == math.inf


def test_no_limit_is_written_max_or_minus_one(tmp_path: Path) -> None:
    root = system(tmp_path, "0::/\n", V2.format(root="/"), **{"cpu.max": "max 100000\n"})
    assert cpu_quota(root) == math.inf
    files = {"cpu,cpuacct__cpu.cfs_quota_us": "-1", "cpu,cpuacct__cpu.cfs_period_us": "100000"}
    assert (
        cpu_quota(system(tmp_path, "4:cpu,cpuacct:/\n", V1.format(root="/"), **files)) == math.inf
    )


def test_a_container_sees_its_own_cgroup_as_the_root(tmp_path: Path) -> None:
    root = system(tmp_path, "0::/\n", V2.format(root="/"), **{"cpu.max": "350000 100000\n"})
    assert cpu_quota(root) == 3.5
    assert num_usable_cores(root) == min(3, num_usable_cores())


def test_the_smallest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {
        "job__cpu.max": "200000 100000",
        "job__step__cpu.max": "400000 100000",
        "other__cpu.max": "100000 100000",
    }
    assert cpu_quota(system(tmp_path, "0::/job/step\n", V2.format(root="/"), **files)) == 2.0


@pytest.mark.parametrize("own", ["/docker/abc", "/"])
def test_version_1_in_a_container_that_sees_the_hosts_paths(tmp_path: Path, own: str) -> None:
    files = {"cpu,cpuacct__cpu.cfs_quota_us": "50000", "cpu,cpuacct__cpu.cfs_period_us": "100000"}
    cgroup = f"5:memory:/elsewhere\n4:cpu,cpuacct:{own}\n0::/\n"
    root = system(tmp_path, cgroup, V1.format(root="/docker/abc"), **files)
    assert cpu_quota(root) == 0.5
    assert num_usable_cores(root) == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks here")
def test_the_affinity_mask_counts() -> None:
    code = (
        "import os\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from gpupool.core.machine.cores import num_usable_cores\n"
        "print(num_usable_cores())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "1"
