"""Ranks of plain torch, without a pool: fresh processes, forked from one that has torch."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed"])
LIMIT_S = 60.0  # the first one imports torch


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    n: int = 2,
    **environment: str,
) -> list[Any]:
    """What `function(rank, *args)` returns on each of n ranks, which have a gloo group.

    A rank that dies gives its exit code as `Ended`; one that raises fails here with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(n):
            ours, theirs = _CONTEXT.Pipe()
            place = (rank, n, str(Path(folder) / "store"), environment)
            process = _CONTEXT.Process(
                target=_run, args=(theirs, place, function, args), daemon=True
            )
            process.start()
            theirs.close()
            started.append((process, ours))
        try:
            return [_result(process, pipe) for process, pipe in started]
        finally:
            for process, pipe in started:
                pipe.close()
                process.kill()
                process.join()


class Ended(int):
    """The exit code of a rank that has ended without a result."""


def _result(process: Any, pipe: multiprocessing.connection.Connection) -> Any:
    assert pipe.poll(LIMIT_S), f"no result within {LIMIT_S:g} s"
    try:
        ok, value = pipe.recv()
    except EOFError:
        process.join(LIMIT_S)
        return Ended(process.exitcode)
    assert ok, value
    return value


def _run(
    pipe: multiprocessing.connection.Connection,
    place: tuple[int, int, str, dict[str, str]],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    rank, n, path, environment = place
    os.environ.update(GLOO_SOCKET_IFNAME="lo", **environment)
    dist.set_debug_level_from_env()  # torch has read it when it was imported
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(path, n),  # type: ignore[attr-defined]
            rank=rank,
            world_size=n,
            timeout=timedelta(seconds=20),
        )
        pipe.send((True, function(rank, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    # the others may still use the connections to this one
    pipe.poll(LIMIT_S)
