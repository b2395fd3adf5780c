"""The GPUs of this machine and who uses them. Runs on the client."""

from __future__ import annotations

from gpupool.core.gpu_table import GpuTable
from gpupool.core.topology import discover
from gpupool.pool import session


def gpus() -> GpuTable:
    """The GPUs and MIG instances of this machine, as a table: memory, load, who holds them.

    "available" tells whether a pool of this notebook can use it, "selected" which rank of it does.
    """
    found = discover()
    pool = session.find()
    ranks = pool.ranks if pool is not None else ()
    selected = {rank.gpu.uuid: f"rank {rank.rank}" for rank in ranks if rank.gpu}
    return GpuTable(found.gpus, selected, found.why_none)
