"""A pool's status as text, where its ranks are on GPUs of other hosts."""

from __future__ import annotations

from dataclasses import replace

from gpupool import Pool
from gpupool.core.machine.topology import Gpu
from gpupool.notebook.pool.bar import rank_rows, status_text


def test_each_rank_has_its_host_beside_it(pool2: Pool) -> None:
    status = pool2.status()
    ranks = [
        replace(one, host=f"gpu{one.rank + 1}", gpu=Gpu(one.rank, "GPU-0", "NVIDIA H200"))
        for one in status.ranks
    ]
    shown = replace(status, ranks=tuple(ranks))
    first, *lines = status_text(shown).splitlines()
    assert first.startswith("Pool of 2 on 2 hosts: idle, ")
    assert lines[1].startswith("  rank 1 (gpu2)  1: NVIDIA H200  ")
    assert rank_rows(shown)[1][0] == "1 (gpu2)"
