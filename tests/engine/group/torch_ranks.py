"""Ranks of plain torch, without a pool: fresh processes, forked from one that has torch."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed"])
LIMIT_S = 60.0  # the first one imports torch


def run_ranks(function: Callable[..., Any], *args: Any, n: int = 2) -> list[Any]:
    """What `function(rank, *args)` returns on each of n ranks, which have a gloo group."""
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(n):
            ours, theirs = _CONTEXT.Pipe()
            work = (theirs, rank, n, str(Path(folder) / "store"), function, args)
            process = _CONTEXT.Process(target=_run, args=work, daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        try:
            return [_result(pipe) for _, pipe in started]
        finally:
            for process, pipe in started:
                pipe.close()
                process.kill()
                process.join()


def _result(pipe: Connection) -> Any:
    assert pipe.poll(LIMIT_S), f"no result within {LIMIT_S:g} s"
    ok, value = pipe.recv()
    assert ok, value
    return value


def _run(
    pipe: Connection,
    rank: int,
    n: int,
    path: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        store = dist.FileStore(path, n)  # type: ignore[attr-defined]
        limit = timedelta(seconds=20)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=limit)
        pipe.send((True, function(rank, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    # the others may still use the connections to this one
    pipe.poll(LIMIT_S)
