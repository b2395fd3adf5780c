"""Ranks of plain torch, without a pool: fresh processes, forked from one that has torch."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed"])
LIMIT_S = 60.0  # the first one imports torch


def run_ranks(function: Callable[..., Any], *args: Any, n: int = 2) -> list[Any]:
    """What `function(rank, *args)` returns on each of n ranks, which have a gloo group."""
    with tempfile.TemporaryDirectory() as folder:
        executor = ProcessPoolExecutor(n, _CONTEXT)
        store = f"{folder}/store"
        try:
            results = [executor.submit(_run, store, n, rank, function, args) for rank in range(n)]
            return [result.result(LIMIT_S) for result in results]
        finally:  # till here the others may still use the connections to one that has returned
            for process in executor._processes.values():
                process.kill()
            executor.shutdown()


def _run(path: str, n: int, rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(path, n)  # type: ignore[attr-defined]
    limit = timedelta(seconds=20)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=limit)
    return function(rank, *args)
