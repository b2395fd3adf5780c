"""What this process may use of the machine: cores and memory. Runs anywhere.

More threads than cores make torch slower than one thread does, so the ranks of a machine divide
what there really is: a scheduler gives a job some of the cores (the affinity mask), a container
mostly all of them for a share of the time (a quota of its cgroup, which `nproc` does not show).
"""

from __future__ import annotations

import math
import os
from pathlib import Path

ROOT = Path("/")
# NCCL needs 10 to 33 MiB a connection where GPUs cannot reach each other; so do data loaders.
_SHARED_BYTES = 1 << 30


def num_usable_cores(root: Path = ROOT) -> int:
    """Cores this process may use at a time, at least 1: affinity mask and cgroup quota."""
    # Rounded down: a thread too many is stopped for a part of every 0.1 s, and all wait for it.
    return max(1, math.floor(min(len(os.sched_getaffinity(0)), cpu_quota(root))))


def cpu_quota(root: Path = ROOT) -> float:
    """Cores' worth of time that the cgroups of this process allow; infinity without a limit."""
    quotas = [math.inf]
    for folder in folders("cpu", root):
        words = text(folder / "cpu.max").split()
        if not words:  # version 1
            words = [text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if all(map(str.isdecimal, words)):  # not "max", "-1", or no such file
            quotas.append(int(words[0]) / max(1, int(words[1])))
    return min(quotas)


def memory_limit(root: Path = ROOT) -> int:
    """Bytes that the cgroups of this process allow; 0 without a limit."""
    said = [
        text(folder / name).strip()
        for folder in folders("memory", root)
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    # beyond: version 1's way to say none
    limits = [int(limit) for limit in said if limit.isdecimal() and int(limit) < 1 << 60]
    return min(limits, default=0)


def folders(kind: str, root: Path = ROOT) -> list[Path]:
    """The folders of this process's cgroup of a kind, and of those above it, which limit it too.

    In either version of cgroups; its own is the first. A container may be told the path that its
    cgroup has on the host: of that the root alone is there, and is its own.
    """
    found: list[Path] = []
    for line in text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or kind in controllers.split(","):
            top = root / "sys/fs/cgroup" / (kind if controllers else "")
            own = top / path.lstrip("/")
            found += [own, *(above for above in own.parents if above.is_relative_to(top))]
    return found


def text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def little_shared_memory() -> str:
    """What to say if shared memory is small, as it is in a container by default; else ""."""
    found = os.statvfs("/dev/shm")  # noqa: S108 - the one that NCCL uses
    size = found.f_blocks * found.f_frsize
    if size >= _SHARED_BYTES:
        return ""
    return (
        f"Shared memory (/dev/shm) has {size >> 20} MiB, which NCCL and data loaders can fill: "
        "give the container more (`docker run --shm-size=8g`, or --ipc=host)."
    )
