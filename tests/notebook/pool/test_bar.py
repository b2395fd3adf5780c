"""A pool's status as text and HTML. Statuses are plain data here, GPUs included."""

from __future__ import annotations

import re
from dataclasses import replace

from gpupool.core.machine.topology import NO_DRIVER, Discovery, Gpu, survey
from gpupool.core.options.pool_options import PoolOptions
from gpupool.notebook.pool.bar import (
    bar_of,
    status_html,
    status_text,
)
from gpupool.notebook.pool.host_table import hosts_shown
from gpupool.notebook.pool.tables import waits_text
from gpupool.pool.launchers.placement import place_ranks
from gpupool.pool.status import HostInfo, PoolStatus

TWO = survey([Gpu(i, f"GPU-{i}", "NVIDIA H200") for i in range(2)], None)


def status(found: Discovery, n: int | None = None) -> PoolStatus:
    placement = place_ranks(
        PoolOptions(n=n), lambda uuids, number: list(uuids[:number]), found=found, num_cores=8
    )
    return PoolStatus(
        state="idle",
        reason="",
        backend=placement.backend,
        generation=1,
        ranks=placement.ranks,
        pids={rank.rank: 100 + rank.rank for rank in placement.ranks},
        env={},
        idle_left_s=None,
        training_ranks=placement.training_ranks,
        training_backend=placement.training_backend,
        why_cpu=placement.why_cpu,
    )


def test_ranks_that_take_no_part_in_training_are_named() -> None:
    shown = status(TWO, n=4)
    first, *ranks = status_text(shown).splitlines()
    assert first == (
        "Pool of 4: idle, one engine per GPU (NVIDIA H200), 2 CPU ranks (not used for training), "
        "gloo (training: nccl), no idle timeout"
    )
    assert ranks[1] == "  rank 1  1: NVIDIA H200  2 threads  pid 101"
    assert ranks[2] == "  rank 2  CPU (not used for training)  2 threads  pid 102"
    assert "CPU (not used for training)" in status_html(shown)
    assert ", 1 CPU rank (not used for training), " in status_text(status(TWO, n=3))


def test_a_rank_that_is_being_replaced_has_no_process() -> None:
    reason = "rank 1 was killed by SIGKILL; its variables are lost."
    shown = replace(status(Discovery((), NO_DRIVER)), state="replacing", reason=reason)
    shown = replace(shown, pids={0: 100}, generation=2)
    head, told, first, second = status_text(shown).splitlines()
    assert head.startswith("Pool of 2: replacing, CPU ranks")
    assert "generation" not in head + status_html(shown)
    assert "re-formed once" in status_html(shown)
    assert "re-formed 11 times" in status_html(replace(shown, generation=12))
    assert told == reason
    assert (first, second) == (
        "  rank 0  CPU  4 threads  pid 100",
        "  rank 1  CPU  4 threads  no process",
    )
    assert reason in status_html(shown)


def on_hosts(shown: PoolStatus, num_hosts: int) -> PoolStatus:
    """The same with its ranks on so many hosts."""
    size = len(shown.ranks) // num_hosts
    ranks = [replace(r, host=f"gpu{r.rank // size + 1}") for r in shown.ranks]
    return replace(shown, ranks=tuple(ranks))


def test_each_rank_has_its_host_beside_it() -> None:
    sixteen = survey([Gpu(i % 4, f"GPU-{i}", "NVIDIA H200") for i in range(16)], None)
    shown = on_hosts(status(sixteen), 4)
    first, *ranks = status_text(shown).splitlines()
    assert first.startswith("Pool of 16 on 4 hosts: idle, one engine per GPU (NVIDIA H200), nccl")
    assert ranks[9] == "  rank 9 (gpu3)  1: NVIDIA H200  1 thread  pid 109"
    assert bar_of(shown).ranks[4][0] == "4 (gpu2)"
    assert bar_of(on_hosts(status(TWO), 1)).title == "Pool of 2 on gpu1"
    shown = replace(shown, pids=dict.fromkeys(range(6), 1))
    listed = "6, 7 (gpu2), 8-11 (gpu3), 12-15 (gpu4)"
    assert waits_text(shown) == f"gpupool: waiting for ranks {listed} to be replaced…"


def test_hosts_are_a_table_that_says_what_is_known() -> None:
    versions = {"python": "3.12.3", "gpupool": "0.1.0", "torch": "2.11.0"}
    up = HostInfo(
        *("gpu<1>", (0, 1, 2), ("NVIDIA H200",) * 2 + ("T4",), "10.1.0.1", "eth0", "up"),
        *(versions, 0.274, "NET/IB"),
    )
    lost = replace(up, name="b", ranks=(3,), gpus=(), state="lost: x", versions={}, ping_ms=None)
    text, html = hosts_shown([up, replace(lost, nccl="")]).values()
    head, first, second = (re.split(r"  +", line) for line in text.splitlines())
    assert dict(zip(head, first, strict=True)) == {
        "host": "gpu<1>",
        "state": "up",
        "ranks": "0-2",
        "GPUs": "2 × NVIDIA H200, 1 × T4",
        "address": "10.1.0.1 (eth0)",
        "round trip": "0.27 ms",
        "versions": "python 3.12.3, gpupool 0.1.0, torch 2.11.0",
        "NCCL": "NET/IB",
    }
    assert second == ["b", "lost: x", "3", "–", "10.1.0.1 (eth0)", "–", "–", "–"]
    assert ("gpu&lt;1&gt;" in html, "gpu<1>" in html, "NCCL" in html) == (True, False, True)
    assert "NCCL" not in hosts_shown([replace(up, nccl="")])["text/plain"]
