"""How many cores this process may use. Runs anywhere.

More threads than cores make torch slower than one thread does, so the ranks of a machine divide
what there really is. The number of cores of the machine is not that: a scheduler gives a job some
of them (the affinity mask, which `nproc` shows), and a container mostly all of them for a share of
the time (a quota of its cgroup, which neither `nproc` nor `os.process_cpu_count` shows). Each rank
gets its part as `OMP_NUM_THREADS` and by `torch.set_num_threads`. On a machine with several NUMA
nodes a rank runs on those CPUs that are near to its GPU: what it copies there is in their memory.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath


def num_usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may use at a time, at least 1: affinity mask and cgroup quota.

    Args:
        root: where `proc` and the cgroup file systems are.
    """
    num_allowed = len(usable_cpus()) or os.cpu_count() or 1
    # Rounded down: a thread too many is stopped for a part of every 0.1 s, and all wait for it.
    return max(1, math.floor(min(num_allowed, cpu_quota(root))))


def usable_cpus() -> frozenset[int]:
    """The CPUs that this process may run on, by number; none where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset()


def run_on(cpus: Iterable[int]) -> None:
    """Have this process run on these CPUs alone; on all it may, if there are none.

    Threads that exist keep what they have. What cannot be had is not worth a process.
    """
    wanted = set(cpus) & usable_cpus()
    if wanted:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, wanted)


def cpu_quota(root: Path = Path("/")) -> float:
    """Cores' worth of time that the cgroups of this process allow; infinity without a limit.

    A cgroup is limited by those above it as well, so the smallest limit on the way up counts.
    Both versions of cgroups are read: `cpu.max`, and `cpu.cfs_quota_us` over `cpu.cfs_period_us`.
    """
    return min(
        (_limit(folder) for folder in _cgroup_folders(root)),
        default=math.inf,
    )


def _cgroup_folders(root: Path) -> list[Path]:
    """The folders of this process's CPU cgroups and of those above them, as far as mounted."""
    own = _own_cgroups(_read(root / "proc/self/cgroup"))
    folders = []
    for line in _read(root / "proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = [*rest.split(), "", "", ""][:3]
        if kind not in ("cgroup", "cgroup2") or (kind == "cgroup" and not _has_cpu(options)):
            continue
        mount_root, mount_point = fields.split()[3:5]
        base = root / mount_point.lstrip("/")
        try:  # a container may see its own cgroup as the root of the mount
            below = PurePosixPath(own.get(kind, "/")).relative_to(mount_root)
        except ValueError:
            below = PurePosixPath()
        if ".." in below.parts:  # it is outside of what this cgroup namespace shows
            below = PurePosixPath()
        folders += [base / below, *(base / parent for parent in below.parents)]
    return folders


def _own_cgroups(text: str) -> dict[str, str]:
    """Kind of cgroup -> path of ours, from lines like "0::/a" and "4:cpu,cpuacct:/a"."""
    own = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            own["cgroup2"] = path
        elif _has_cpu(controllers):
            own["cgroup"] = path
    return own


def _limit(folder: Path) -> float:
    quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
    if not quota:
        quota = _read(folder / "cpu.cfs_quota_us").strip()
        period = _read(folder / "cpu.cfs_period_us").strip()
    if not (quota.isdecimal() and period.isdecimal()):  # "max", "-1", or no such file
        return math.inf
    return int(quota) / max(1, int(period))


def _has_cpu(controllers: str) -> bool:
    return "cpu" in controllers.split(",")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not there on this system
        return ""
