"""Whether the kernel ended a process because memory ran out. Runs on the host.

SIGKILL does not say who sent it. The kernel counts its out-of-memory kills for each cgroup (the
container, the job): those of its processes, whether its own limit was reached or the machine had no
memory left. A count that has risen proves it. Only where a cgroup's count cannot be read, that of
the machine is looked at, which counts the processes of others, too.
"""

from __future__ import annotations

from pathlib import Path

from gpupool.core.machine import limits


class OutOfMemoryWatch:
    """Compares the kernel's count with that of earlier: each kill explains one death."""

    def __init__(self, proc: Path = limits.PROC, cgroups: Path = limits.CGROUPS) -> None:
        self._proc = proc
        self._cgroups = cgroups
        self.renew()

    def renew(self) -> None:
        """Forget the kills until now: they are of others."""
        self._seen = self._count()[0]

    def reason(self) -> str:
        """Why a process was killed, if that may have been the kernel; "" if not."""
        count, is_own = self._count()
        if count <= self._seen:
            return ""
        self._seen += 1
        if not is_own:
            return (
                "perhaps out of host memory: since it was started the kernel has ended a process "
                "of this machine for that"
            )
        limit = limits.memory_limit(self._proc, self._cgroups)
        if not limit:
            return "out of host memory: the kernel has ended it for that"
        return (
            f"out of host memory: the memory limit of its cgroup ({limit / 2**30:.1f} GiB) was "
            "reached"
        )

    def _count(self) -> tuple[int, bool]:
        """How many kills there were, and whether only those of this process's cgroup count."""
        for folder in limits.folders(self._proc, self._cgroups):
            # memory.events is cgroup v2 (.local: without the groups below it), oom_control v1
            for name in ("memory.events.local", "memory.events", "memory.oom_control"):
                count = _kills(folder / name)
                if count is not None:
                    return count, True
        return _kills(self._proc / "vmstat") or 0, False


def _kills(path: Path) -> int | None:
    """The count in a file; None if there is none."""
    for line in limits.text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return None
