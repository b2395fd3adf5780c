"""The limits of the control group (container, job) of this process. Runs anywhere."""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def folders(proc: Path = PROC, cgroups: Path = CGROUPS, kind: str = "memory") -> list[Path]:
    """The folders of this process's cgroup of a kind, seen from the host and inside a container."""
    found = []
    for line in text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", kind):
            root = cgroups / controllers
            found += [root / path.lstrip("/"), root]
    return found


def memory_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """In bytes; 0 without one."""
    for folder in folders(proc, cgroups):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = text(folder / name).strip()
            if limit.isdecimal() and int(limit) < 1 << 60:  # beyond: v1's way to say none
                return int(limit)
    return 0


def has_met_process_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> bool:
    """Whether the kernel has refused a process or thread for lack of room in the cgroup."""
    events = [text(folder / "pids.events").split() for folder in folders(proc, cgroups, "pids")]
    return any(words[:1] == ["max"] and words[1:2] != ["0"] for words in events)


def text(path: Path) -> str:
    """What a file says; "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
