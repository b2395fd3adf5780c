"""The GPUs of this machine and who uses them. Runs on the client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpupool.core.gpu_table import GpuTable
from gpupool.core.topology import discover
from gpupool.pool import session

if TYPE_CHECKING:
    from gpupool.pool.pool import Pool


def gpus() -> GpuTable:
    """The GPUs and MIG instances of this machine, as a table: memory, load, who holds them.

    "available" tells whether a pool of this notebook can use it, "selected" which rank of it does.
    """
    found = discover()
    pool = session.find()
    ranks = pool.ranks if pool is not None else ()
    selected = {rank.gpu.uuid: f"rank {rank.rank}" for rank in ranks if rank.gpu}
    return GpuTable(found.gpus, selected, found.why_none, _instead(pool))


def _instead(pool: Pool | None) -> str:
    """The sentence on what a pool without GPUs computes on: that of this notebook, or a new one."""
    if pool is None:
        return "A pool has 2 CPU ranks then, or as many as you like: `%gpupool start -n 4`."
    num_threads = sorted({rank.num_threads for rank in pool.ranks})
    shown = " or ".join(map(str, num_threads))
    threads = "thread" if shown == "1" else "threads"
    ranks = "1 CPU rank" if pool.world_size == 1 else f"{pool.world_size} CPU ranks"
    return f"The pool has {ranks} of {shown} {threads} each."
