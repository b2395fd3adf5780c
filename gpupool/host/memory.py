"""Whether the kernel ended a process because memory ran out. Runs on the host.

SIGKILL does not say who sent it. The kernel counts its out-of-memory kills: for the cgroup (the
container, the job) and for the machine. A count that has risen tells.
"""

from __future__ import annotations

from pathlib import Path


class OutOfMemoryWatch:
    """Compares the kernel's counts with those of earlier: each kill explains one death."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
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
            limit = self._limit()
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
        for folder in self._folders():
            # memory.events is cgroup v2, memory.oom_control v1
            for name in ("memory.events.local", "memory.events", "memory.oom_control"):
                group = max(group, _count(folder / name))
        return group, _count(self._proc / "vmstat")

    def _limit(self) -> int:
        for folder in self._folders():
            for name in ("memory.max", "memory.limit_in_bytes"):
                text = _text(folder / name).strip()
                if text.isdecimal() and int(text) < 1 << 60:  # beyond: v1's way to say none
                    return int(text)
        return 0

    def _folders(self) -> list[Path]:
        """The cgroup of this process, seen from the host and from inside a container."""
        found = []
        for line in _text(self._proc / "self" / "cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                root = self._cgroups / controllers
                found += [root / path.lstrip("/"), root]
        return found


def _count(path: Path) -> int:
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
