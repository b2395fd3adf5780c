"""What this process may use: affinity mask, and the quotas and limits of its cgroups."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from gpupool.core.machine.limits import cpu_quota, memory_limit, num_usable_cores


def system(root: Path, own: str, **files: str) -> Path:
    """A folder with `own` as /proc/self/cgroup, and `files` of cgroups: "__" means "/"."""
    content = {"proc/self/cgroup": own}
    content |= {f"sys/fs/cgroup/{name.replace('__', '/')}": text for name, text in files.items()}
    for name, text in content.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def version_1(quota: str, memory: str) -> dict[str, str]:
    cpu = {"cpu__cpu.cfs_quota_us": quota, "cpu__cpu.cfs_period_us": "100000"}
    return {**cpu, "memory__memory.limit_in_bytes": memory}


TREE = {
    "job__cpu.max": "250000 100000",
    "job__step__cpu.max": "400000 100000",
    "other__cpu.max": "100000 100000",
    "job__memory.max": "1024",
    "job__step__memory.max": "max",
}
V1 = "5:memory:{0}\n4:cpu,cpuacct:{0}\n0::/\n"
LIMITED = version_1("50000", "1024")


@pytest.mark.parametrize(
    ("own", "files", "cores", "memory"),
    [
        ("", {}, math.inf, 0),
        ("0::/\n", {"cpu.max": "max 100000\n", "memory.max": "max"}, math.inf, 0),
        (V1.format("/"), version_1("-1", str(0x7FFFFFFFFFFFF000)), math.inf, 0),
        ("0::/job/step\n", TREE, 2.5, 1024),  # the smallest on the way up counts
        (V1.format("/"), LIMITED, 0.5, 1024),
        (V1.format("/docker/abc"), LIMITED, 0.5, 1024),  # a container, told the host's path
    ],
)
def test_limits_of_both_versions_of_cgroups(
    tmp_path: Path, own: str, files: dict[str, str], cores: float, memory: int
) -> None:
    root = system(tmp_path, own, **files)
    assert (cpu_quota(root), memory_limit(root)) == (cores, memory)
    assert num_usable_cores(root) == max(1, min(int(min(cores, 1e9)), num_usable_cores()))


def test_the_affinity_mask_counts() -> None:
    mask = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mask)})
    try:
        assert num_usable_cores() == 1
    finally:
        os.sched_setaffinity(0, mask)
