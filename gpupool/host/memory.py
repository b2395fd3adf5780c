"""Whether the kernel ended a process because memory ran out. Runs on the host.

SIGKILL does not say who sent it. The kernel counts its out-of-memory kills: for the cgroup (the
container, the job) and for the machine. A count that has risen tells.
"""

from __future__ import annotations

from pathlib import Path

from gpupool.core import cgroup


class OutOfMemoryWatch:
    """Compares the kernel's counts with those of earlier: each kill explains one death."""

    def __init__(self, proc: Path = cgroup.PROC, cgroups: Path = cgroup.CGROUPS) -> None:
        self._proc = proc
        self._cgroups = cgroups
        self._seen = (0, 0)
        self.renew()

    def renew(self) -> None:
        """Forget the kills until now: they are of others."""
        self._seen = self._counts()

    def reason(self) -> str:
        """Why a process was killed, if that may have been the kernel; "" if not."""
        now = self._counts()
        if now[0] > self._seen[0]:
            self._seen = self._seen[0] + 1, self._seen[1] + 1  # the machine counts it too
            limit = cgroup.memory_limit(self._proc, self._cgroups)
            size = f" ({limit / 2**30:.1f} GiB)" if limit else ""
            return f"out of host memory: the memory limit of its cgroup{size} was reached"
        if now[1] > self._seen[1]:
            self._seen = self._seen[0], self._seen[1] + 1
            return (
                "perhaps out of host memory: since it was started the kernel has ended a process "
                "of this machine for that"
            )
        return ""

    def _counts(self) -> tuple[int, int]:
        """Kills in this process's cgroup and on the whole machine; 0 where not counted."""
        group = 0
        for folder in cgroup.folders(self._proc, self._cgroups):
            # memory.events is cgroup v2, memory.oom_control v1
            for name in ("memory.events.local", "memory.events", "memory.oom_control"):
                group = max(group, _count(folder / name))
        return group, _count(self._proc / "vmstat")


def _count(path: Path) -> int:
    for line in cgroup.text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return 0
