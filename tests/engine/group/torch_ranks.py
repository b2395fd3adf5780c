"""Ranks of plain torch, without a pool: fresh processes, forked from one that has torch."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gpupool.core.machine.topology import Rank
from gpupool.core.wire import environ
from gpupool.core.wire.calls import GroupPlan
from gpupool.engine.group import forming

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed"])
LIMIT_S = 60.0  # the first one imports torch


def run_ranks(function: Callable[..., Any], *args: Any, n: int = 2) -> list[Any]:
    """What `function(rank, *args)` returns on each of n ranks, which have a gloo group."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _processes(n, _join_group, str(Path(folder) / "store"), function, args) as pipes,
    ):
        return [_result(pipe) for pipe in pipes]


def run_hosts(function: Callable[..., Any], *, n: int = 2) -> list[Any]:
    """What `function(here, plan)` returns on each of n ranks, which have joined.

    They are as if each was on another host, and can `connect` by the plan.
    """
    with _processes(n, _join_host, function) as pipes:
        store, *_ = [_result(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send(store)
        return [_result(pipe) for pipe in pipes]


def plan_at(store: str) -> GroupPlan:
    """That of ranks on several hosts, all of which train on gloo."""
    return GroupPlan(store, "gloo", range(9), "gloo", key="5ec2e7" * 8)


@contextlib.contextmanager
def _processes(n: int, work: Callable[..., Any], *args: Any) -> Iterator[list[Connection]]:
    """Processes that do `work(pipe, rank, n, *args)`; the ends of their pipes."""
    started = []
    for rank in range(n):
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_run, args=(work, theirs, rank, n, *args), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    try:
        yield [pipe for _, pipe in started]
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


def _run(work: Callable[..., Any], pipe: Connection, *args: Any) -> None:
    os.environ.update(environ.for_groups()[0])
    try:
        pipe.send((True, work(pipe, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    # the others may still use the connections to this one
    pipe.poll(LIMIT_S)


def _join_group(
    _: Connection, rank: int, n: int, path: str, function: Callable[..., Any], args: Any
) -> Any:
    store = dist.FileStore(path, n)  # type: ignore[attr-defined]
    limit = timedelta(seconds=20)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=limit)
    return function(rank, *args)


def _join_host(pipe: Connection, rank: int, n: int, function: Callable[..., Any]) -> Any:
    here = Rank(rank, n, "cpu", None, 1, 0, 1, rank, n, f"gpu{rank}", "127.0.0.1", "lo")
    os.environ[environ.RANK] = json.dumps(asdict(here))
    forming.install()
    pipe.send((True, forming.join()))
    return function(here, plan_at(pipe.recv()))
