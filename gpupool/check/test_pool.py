"""A pool: its processes, devices and group, and what it leaves. Runs on the client."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import psutil

import gpupool
from gpupool import Pool
from gpupool.check import bench, cells
from gpupool.check.bench import Tell
from gpupool.check.command import all_reduced


def test_start_and_stop(where: dict[str, Any], tell: Tell) -> None:
    """the pool is up, and then gone, from its GPUs too"""
    began = time.monotonic()
    with bench.start(where) as pool:
        up_s, pids = time.monotonic() - began, set(pool.status().pids.values())
        began = time.monotonic()
    down_s = time.monotonic() - began
    alive = [pid for pid in pids if psutil.pid_exists(pid)]
    assert not alive, f"ranks that still run: {alive}"
    left = [p.pid for gpu in gpupool.gpus() for p in gpu.processes if p.pid in pids]
    assert not left, f"processes that the driver still shows: {left}"
    tell(f"{len(pids)} ranks, {pool.backend}, after {up_s:.1f} s; gone after {down_s:.1f} s")


def test_pinning(pool: Pool, tell: Tell) -> None:
    """each rank sees its own device, and no other"""
    gpus = set()
    for rank, (number, uuid, threads) in pool.run(cells.devices_seen).items():
        place = pool.ranks[rank]
        said = f"rank {rank} sees {number} GPUs, first {uuid!r}, and has {threads} threads: {place}"
        if place.gpu is None:
            assert (number, threads) == (0, place.num_threads), said
        else:  # of a MIG instance CUDA may give the UUID of its GPU
            assert number == 1, said
            assert place.gpu.parent_uuid or place.gpu.uuid.endswith(uuid), said
            gpus.add(place.gpu.uuid)
    assert len(gpus) in (0, pool.world_size), f"{pool.world_size} ranks share {len(gpus)} GPUs"
    tell(f"{len(gpus)} GPUs" if gpus else f"no GPU, {pool.ranks[0].num_threads} threads each")


def test_group(pool: Pool, tell: Tell) -> None:
    """NCCL among ranks that have a GPU each, else gloo"""
    cards = {rank.gpu.parent_uuid or rank.gpu.uuid for rank in pool.ranks if rank.gpu}
    expected = "nccl" if len(cards) == pool.world_size else "gloo"
    found = pool.run(cells.group_seen)
    seen = f"it should be {expected}: {pool.backend}, {found[0][0]}"
    assert pool.backend == expected, seen
    assert all(expected in config for config, _ in found.values()), seen
    tell(f"{found[0][1]}, {found[0][0]}")


def test_loopback(pool: Pool, tell: Tell) -> None:
    """no process of the pool listens beyond this machine"""
    pool.run(bench.SUM)  # NCCL opens its sockets at the first collective
    listening = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            sockets = process.net_connections(kind="inet")
            ends = [one.laddr for one in sockets if one.status == psutil.CONN_LISTEN]
            listening += [(process.name(), *end) for end in ends]
    outside = [one for one in listening if not one[1].startswith(("127.", "::1"))]
    assert not outside, f"these do: {outside}"
    tell(f"{len(listening)} ports, all at 127.0.0.1")


def test_all_reduce(pool: Pool, on_gpus: bool, tell: Tell) -> None:
    """right sums of five number formats"""
    tell(all_reduced(pool, 64 if on_gpus else 4))
