"""What is told of a death: the kernel's counts as plain input, and the end of a long log."""

from __future__ import annotations

from pathlib import Path

from gpupool.host.endings import OutOfMemoryWatch


def test_each_kill_in_the_own_cgroup_since_the_start_explains_one_death(tmp_path: Path) -> None:
    proc, job = tmp_path / "proc/self", tmp_path / "sys/fs/cgroup/job"
    proc.mkdir(parents=True)
    watch = OutOfMemoryWatch(tmp_path)
    assert watch.reason() == ""  # a kernel that does not count

    (proc / "cgroup").write_text("0::/job\n")
    job.mkdir(parents=True)
    (job / "memory.max").write_text("2147483648\n")
    (job / "memory.events").write_text("oom 9\noom_kill 3\n")
    watch.renew()
    assert watch.reason() == ""
    (job / "memory.events").write_text("oom 9\noom_kill 5\n")
    limit = "out of host memory: the memory limit of its cgroup (2.0 GiB) was reached"
    assert [watch.reason() for _ in range(3)] == [limit, limit, ""]
    (job / "memory.max").write_text("max\n")
    (job / "memory.events").write_text("oom 9\noom_kill 6\n")
    assert watch.reason() == "out of host memory: the kernel has ended it for that"
