"""A pool's status as text and HTML. Statuses are plain data here, GPUs included."""

from __future__ import annotations

from dataclasses import replace

from gpupool.core.machine.topology import Discovery, Gpu, survey
from gpupool.core.options.pool_options import PoolOptions
from gpupool.notebook.pool.bar import rank_rows, status_text
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


def test_each_rank_has_its_host_beside_it() -> None:
    ranks = [replace(rank, host=f"gpu{rank.rank + 1}") for rank in status(TWO).ranks]
    shown = replace(status(TWO), ranks=tuple(ranks))
    first, *lines = status_text(shown).splitlines()
    assert first.startswith("Pool of 2 on 2 hosts: idle, ")
    assert lines[1].startswith("  rank 1 (gpu2)  1: NVIDIA H200  ")
    assert rank_rows(shown)[1][0] == "1 (gpu2)"
