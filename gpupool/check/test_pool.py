"""A pool: its processes, devices and group. Runs on the client."""

from __future__ import annotations

import contextlib
import os

import psutil
import pytest

import gpupool
from gpupool.check import cells
from gpupool.check.bench import SUM, Bench, Tell


@pytest.mark.timeout(240)
def test_start(bench: Bench, tell: Tell) -> None:
    """the pool is up and its process group formed"""
    pool = bench.pool
    tell(f"{pool.world_size} ranks, {pool.backend}, after {bench.start_s:.1f} s")


@pytest.mark.timeout(60)
def test_pinning(bench: Bench, tell: Tell) -> None:
    """each rank sees its own device, and no other"""
    gpus = set()
    for rank, (number, uuid, threads) in bench.call(cells.devices_seen).items():
        place = bench.pool.ranks[rank]
        said = f"rank {rank} sees {number} GPUs, first {uuid!r}, and has {threads} threads: {place}"
        if place.gpu is None:
            assert (number, threads) == (0, place.num_threads), said
        else:  # of a MIG instance CUDA may give the UUID of its GPU
            assert number == 1, said
            assert place.gpu.parent_uuid or place.gpu.uuid.endswith(uuid), said
            gpus.add(place.gpu.uuid)
    assert len(gpus) in (0, bench.n), f"{bench.n} ranks share {len(gpus)} GPUs"
    threads = bench.pool.ranks[0].num_threads
    tell(f"{len(gpus)} GPUs" if gpus else f"no GPU, {threads} threads each")


@pytest.mark.timeout(60)
def test_holders(bench: Bench, tell: Tell) -> None:
    """no process of ours but a GPU's own rank has memory of it"""
    bench.cell("held = torch.ones(2**24, device=device)")
    family = {p.pid: p.name() for p in psutil.Process().children(recursive=True)}
    family[os.getpid()] = "this process"
    rank_of = {pid: rank for rank, pid in bench.pids().items()}
    owners = {rank.gpu.uuid: rank.rank for rank in bench.pool.ranks if rank.gpu is not None}
    held = [(gpu, process.pid) for gpu in gpupool.gpus() for process in gpu.processes]
    for gpu, pid in held:
        is_owner = rank_of.get(pid, -1) == owners.get(gpu.uuid, -2)
        assert is_owner or pid not in family, f"GPU {gpu.label}: {family[pid]} holds memory of it"
    bench.cell("del held")
    if owners and not any(pid in rank_of for _, pid in held):
        pytest.skip("the driver does not show processes here, as in many containers")
    tell(f"{len(owners)} GPUs, {len(family)} processes of ours")


@pytest.mark.timeout(60)
def test_group(bench: Bench, tell: Tell) -> None:
    """NCCL among ranks that have a GPU each, else gloo"""
    cards = {rank.gpu.parent_uuid or rank.gpu.uuid for rank in bench.pool.ranks if rank.gpu}
    expected = "nccl" if len(cards) == bench.n else "gloo"
    found = bench.call(cells.group_seen)
    seen = f"it should be {expected}: {bench.pool.backend}, {found[0][0]}"
    assert bench.pool.backend == expected, seen
    assert all(expected in config for config, _ in found.values()), seen
    tell(f"{found[0][1]}, {found[0][0]}")


@pytest.mark.timeout(60)
def test_loopback(bench: Bench, tell: Tell) -> None:
    """no process of the pool listens beyond this machine"""
    bench.cell(SUM)  # NCCL opens its sockets at the first collective
    listening = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            ask = getattr(process, "net_connections", None) or process.connections
            sockets = [one for one in ask(kind="inet") if one.status == psutil.CONN_LISTEN]
            listening += [(process.name(), *one.laddr) for one in sockets]
    outside = [one for one in listening if not one[1].startswith(("127.", "::1"))]
    assert not outside, f"these do: {outside}"
    tell(f"{len(listening)} ports, all at 127.0.0.1")


@pytest.mark.timeout(90)
def test_all_reduce(bench: Bench, tell: Tell) -> None:
    """right sums of five number formats"""
    num_mib = 64 if bench.on_gpus else 4
    found = bench.call(cells.sums, num_mib * cells.MIB)
    wrong = {rank: names for rank, (names, _) in found.items() if names}
    assert not wrong, f"wrong sums by rank: {wrong}"
    # as NCCL's own tests count it: what each rank has to send and receive
    bus = min(speed for _, speed in found.values()) * 2 * (bench.n - 1) / bench.n
    tell(f"{num_mib} MiB at {bus:.2g} GB/s (bus)" if bench.n > 1 else "one rank")
