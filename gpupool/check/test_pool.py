"""A pool: its processes, devices and group. Runs on the client."""

from __future__ import annotations

import contextlib
import os

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
    uuids = set()
    for rank, (number, uuid, threads) in bench.call(cells.devices_seen).items():
        place = bench.pool.ranks[rank]
        if place.gpu is None:
            if (number, threads) != (0, place.num_threads):
                pytest.fail(
                    f"rank {rank} sees {number} GPUs and has {threads} threads, not "
                    f"{place.num_threads}"
                )
            continue
        # of a MIG instance CUDA may give the UUID of its GPU
        is_right = place.gpu.parent_uuid or place.gpu.uuid.endswith(uuid)
        if number != 1 or not is_right:
            pytest.fail(f"rank {rank} has {place.gpu.uuid}, and sees {number} GPUs, first {uuid}")
        uuids.add(place.gpu.uuid)
    if not uuids:
        tell(f"no GPU, {bench.pool.ranks[0].num_threads} threads each")
        return
    if len(uuids) != bench.n:
        pytest.fail(f"{bench.n} ranks share {len(uuids)} GPUs")
    tell(f"{len(uuids)} GPUs")


@pytest.mark.timeout(60)
def test_holders(bench: Bench, tell: Tell) -> None:
    """no process of ours but a GPU's own rank has memory of it"""
    import psutil

    bench.cell("held = torch.ones(2**24, device=device)")
    family = {p.pid: p.name() for p in psutil.Process().children(recursive=True)}
    family[os.getpid()] = "this process"
    rank_of = {pid: rank for rank, pid in bench.pids().items()}
    owners = {rank.gpu.uuid: rank.rank for rank in bench.pool.ranks if rank.gpu is not None}
    found = gpupool.gpus()
    is_shown = False
    for gpu in found:
        for process in gpu.processes:
            is_shown = is_shown or process.pid in rank_of
            is_owner = rank_of.get(process.pid, -1) == owners.get(gpu.uuid, -2)
            if process.pid in family and not is_owner:
                name = family[process.pid]
                pytest.fail(f"GPU {gpu.label}: {name} ({process.pid}) holds memory of it")
    bench.cell("del held")
    if owners and not is_shown:
        pytest.skip("the driver does not show processes here, as in many containers")
    tell(f"{len(found)} GPUs, {len(family)} processes of ours")


@pytest.mark.timeout(60)
def test_group(bench: Bench, tell: Tell) -> None:
    """NCCL among ranks that have a GPU each, else gloo"""
    cards = {rank.gpu.parent_uuid or rank.gpu.uuid for rank in bench.pool.ranks if rank.gpu}
    expected = "nccl" if len(cards) == bench.n else "gloo"
    found = bench.call(cells.group_seen)
    if bench.pool.backend != expected or any(expected not in seen[0] for seen in found.values()):
        pytest.fail(f"it should be {expected}: {bench.pool.backend}, {found[0][0]}")
    tell(f"{found[0][1]}, {found[0][0]}")


@pytest.mark.timeout(60)
def test_loopback(bench: Bench, tell: Tell) -> None:
    """no process of the pool listens beyond this machine"""
    import psutil

    bench.cell(SUM)  # NCCL opens its sockets at the first collective
    is_open, number = [], 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            ask = getattr(process, "net_connections", None) or process.connections
            for one in ask(kind="inet"):
                if one.status != psutil.CONN_LISTEN:
                    continue
                number += 1
                if not one.laddr.ip.startswith(("127.", "::1")):
                    is_open.append(f"{process.name()} at {one.laddr.ip}:{one.laddr.port}")
    if is_open:
        pytest.fail(", ".join(is_open))
    tell(f"{number} ports, all at 127.0.0.1")


@pytest.mark.timeout(90)
def test_all_reduce(bench: Bench, tell: Tell) -> None:
    """right sums of five number formats"""
    num_mib = 64 if bench.on_gpus else 4
    found = bench.call(cells.sums, num_mib * cells.MIB)
    wrong = {rank: names for rank, (names, _) in found.items() if names}
    if wrong:
        pytest.fail(f"wrong sums by rank: {wrong}")
    if bench.n == 1:
        tell("one rank")
        return
    # as NCCL's own tests count it: what each rank has to send and receive
    bus = min(speed for _, speed in found.values()) * 2 * (bench.n - 1) / bench.n
    tell(f"{num_mib} MiB at {bus:.2g} GB/s (bus)")
