"""What the kernel's counts of out-of-memory kills say of a death; its files as plain input."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpupool.host.memory import OutOfMemoryWatch


class Kernel:
    """A /proc and a /sys/fs/cgroup as the kernel writes them."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self" / "cgroup").write_text("0::/job\n")
        (self.cgroups / "job").mkdir(parents=True)
        (self.cgroups / "job" / "memory.max").write_text("2147483648\n")
        self.count(0, 0)

    def count(self, group: int | None, machine: int) -> None:
        """`group` None: the cgroup does not count."""
        kills = "" if group is None else f"oom_kill {group}\n"
        (self.cgroups / "job" / "memory.events").write_text(f"oom 9\n{kills}")
        (self.proc / "vmstat").write_text(f"nr_free_pages 1\noom_kill {machine}\n")


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_a_kill_in_the_own_cgroup_names_its_limit(kernel: Kernel) -> None:
    watch = OutOfMemoryWatch(kernel.proc, kernel.cgroups)
    assert watch.reason() == ""
    kernel.count(1, 1)
    limit = "out of host memory: the memory limit of its cgroup (2.0 GiB) was reached"
    assert watch.reason() == limit
    assert watch.reason() == ""  # one kill explains one death


def test_two_kills_explain_two_deaths(kernel: Kernel) -> None:
    watch = OutOfMemoryWatch(kernel.proc, kernel.cgroups)
    kernel.count(2, 2)
    assert [bool(watch.reason()) for _ in range(3)] == [True, True, False]


def test_without_a_limit_of_its_own_the_machine_had_no_memory_left(kernel: Kernel) -> None:
    (kernel.cgroups / "job" / "memory.max").write_text("max\n")
    watch = OutOfMemoryWatch(kernel.proc, kernel.cgroups)
    kernel.count(1, 1)
    assert watch.reason() == "out of host memory: the kernel has ended it for that"


def test_kills_elsewhere_on_the_machine_are_of_others(kernel: Kernel) -> None:
    watch = OutOfMemoryWatch(kernel.proc, kernel.cgroups)
    kernel.count(0, 1)
    (kernel.cgroups / "memory.events").write_text("oom_kill 1\n")  # all containers of the machine
    assert watch.reason() == ""


def test_a_kill_on_a_machine_whose_cgroups_do_not_count_is_a_perhaps(kernel: Kernel) -> None:
    kernel.count(None, 0)
    watch = OutOfMemoryWatch(kernel.proc, kernel.cgroups)
    kernel.count(None, 1)
    assert watch.reason().startswith("perhaps out of host memory: since it was started the kernel")
    assert watch.reason() == ""


def test_kills_before_the_process_was_started_are_of_others(kernel: Kernel) -> None:
    watch = OutOfMemoryWatch(kernel.proc, kernel.cgroups)
    kernel.count(3, 5)
    watch.renew()
    assert watch.reason() == ""


def test_a_kernel_that_does_not_count_gives_no_reason(tmp_path: Path) -> None:
    watch = OutOfMemoryWatch(tmp_path / "proc", tmp_path / "cgroup")
    assert watch.reason() == ""
