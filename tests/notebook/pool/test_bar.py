"""A pool's status as text and HTML. Statuses are plain data here, GPUs included."""

from __future__ import annotations

from dataclasses import replace

from gpupool.core.machine.topology import NO_DRIVER, Discovery, Gpu, survey
from gpupool.core.options.pool_options import PoolOptions
from gpupool.notebook.pool.bar import (
    bar_of,
    status_html,
    status_text,
)
from gpupool.pool.launchers.placement import Site, place_on
from gpupool.pool.status import PoolStatus

TWO = survey([Gpu(i, f"GPU-{i}", "NVIDIA H200") for i in range(2)], None)


def status(found: Discovery, n: int | None = None) -> PoolStatus:
    site = Site(lambda uuids, number: list(uuids[:number]), found, num_cores=8)
    placement = place_on(PoolOptions(n=n), [site])
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


def test_each_rank_has_its_host_beside_it() -> None:
    ranks = [replace(rank, host=f"gpu{rank.rank + 1}") for rank in status(TWO).ranks]
    shown = replace(status(TWO), ranks=tuple(ranks))
    first, *lines = status_text(shown).splitlines()
    assert first.startswith("Pool of 2 on 2 hosts: idle, ")
    assert lines[1].startswith("  rank 1 (gpu2)  1: NVIDIA H200  ")
    assert bar_of(shown).ranks[1][0] == "1 (gpu2)"
