"""What this process may use of the machine: cores, memory, processes. Runs anywhere.

More threads than cores make torch slower than one thread does, so the ranks of a machine divide
what there really is. The number of cores of the machine is not that: a scheduler gives a job some
of them (the affinity mask, which `nproc` shows), and a container mostly all of them for a share of
the time (a quota of its cgroup, which neither `nproc` nor `os.process_cpu_count` shows).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def num_usable_cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Cores this process may use at a time, at least 1: affinity mask and cgroup quota."""
    num_allowed = len(usable_cpus()) or os.cpu_count() or 1
    # Rounded down: a thread too many is stopped for a part of every 0.1 s, and all wait for it.
    return max(1, math.floor(min(num_allowed, cpu_quota(proc, cgroups))))


def usable_cpus() -> frozenset[int]:
    """The CPUs that this process may run on, by number."""
    return frozenset(os.sched_getaffinity(0))


def run_on(cpus: Iterable[int]) -> None:
    """Have this process run on these CPUs alone; on all it may, if there are none.

    Threads that exist keep what they have. What cannot be had is not worth a process.
    """
    wanted = set(cpus) & usable_cpus()
    if wanted:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, wanted)


def cpu_quota(proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """Cores' worth of time that the cgroups of this process allow; infinity without a limit."""
    quotas = [math.inf]
    for folder in folders(proc, cgroups, "cpu"):
        quota, _, period = text(folder / "cpu.max").strip().partition(" ")
        if not quota:
            quota = text(folder / "cpu.cfs_quota_us").strip()
            period = text(folder / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal():  # not "max", "-1", or no such file
            quotas.append(int(quota) / max(1, int(period)))
    return min(quotas)


def memory_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes that the cgroups of this process allow; 0 without a limit."""
    limits = [
        int(limit)
        for folder in folders(proc, cgroups)
        for name in ("memory.max", "memory.limit_in_bytes")
        # beyond: version 1's way to say none
        if (limit := text(folder / name).strip()).isdecimal() and int(limit) < 1 << 60
    ]
    return min(limits, default=0)


def has_met_process_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> bool:
    """Whether the kernel has refused a process or thread for lack of room in the cgroup."""
    events = [text(folder / "pids.events").split() for folder in folders(proc, cgroups, "pids")]
    return any(words[:1] == ["max"] and words[1:2] != ["0"] for words in events)


def folders(proc: Path = PROC, cgroups: Path = CGROUPS, kind: str = "memory") -> list[Path]:
    """The folders of this process's cgroup of a kind, in either version of cgroups, and of those
    above it, which limit it as well; its own is the first.

    A container may be told the path that its cgroup has on the host: of that the root alone is
    there, and is its own.
    """
    found: list[Path] = []
    for line in text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or kind in controllers.split(","):
            root = cgroups / kind if controllers else cgroups
            own = root / path.lstrip("/")
            found += [own, *(above for above in own.parents if above.is_relative_to(root))]
    return found


def text(path: Path) -> str:
    """What a file says; "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
