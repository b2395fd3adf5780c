"""Checks of a pool: its processes, devices and group, and what it leaves. Runs on the client."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import gpupool
from gpupool.check import cells
from gpupool.check.bench import SUM, Bench
from gpupool.check.promise import Check, Found, NotKeptError, NotTriedError, check
from gpupool.core.machine.limits import little_shared_memory

_SHM = Path("/dev/shm")  # noqa: S108 - the one that NCCL uses
_DEPTH = 2  # folders below those in which something could be left


@check(limit_s=240.0)
def start(bench: Bench) -> Found:
    """the pool is up and its process group formed"""
    pool = bench.pool
    words = f"{pool.world_size} ranks, {pool.backend}, after {bench.start_s:.1f} s"
    return Found(words, start_s=bench.start_s, ranks=pool.world_size)


@check(limit_s=10.0)
def machine(bench: Bench) -> Found:
    """nothing in how the machine is set up is in the way of a pool"""
    found = little_shared_memory() if bench.on_gpus and bench.n > 1 else ""
    free = shutil.disk_usage(_SHM).free / 2**30 if _SHM.is_dir() else 0.0
    words = f"{found} {free:.1f} GiB free in /dev/shm".lstrip()
    return Found(words, is_note=bool(found), shm_free_gib=free)


@check(limit_s=60.0)
def pinning(bench: Bench) -> Found:
    """each rank sees its own device, and no other"""
    uuids = set()
    for rank, (number, uuid, threads) in bench.call(cells.devices_seen).items():
        place = bench.pool.ranks[rank]
        if place.gpu is None:
            if (number, threads) != (0, place.num_threads):
                raise NotKeptError(
                    f"rank {rank} sees {number} GPUs and has {threads} threads, not "
                    f"{place.num_threads}"
                )
            continue
        # of a MIG instance CUDA may give the UUID of its GPU
        is_right = place.gpu.parent_uuid or place.gpu.uuid.endswith(uuid)
        if number != 1 or not is_right:
            raise NotKeptError(
                f"rank {rank} has {place.gpu.uuid}, and sees {number} GPUs, first {uuid}"
            )
        uuids.add(place.gpu.uuid)
    if not uuids:
        return Found(f"no GPU, {bench.pool.ranks[0].num_threads} threads each")
    if len(uuids) != bench.n:
        raise NotKeptError(f"{bench.n} ranks share {len(uuids)} GPUs")
    return Found(f"{len(uuids)} GPUs", gpus=len(uuids))


@check(limit_s=60.0)
def holders(bench: Bench) -> Found:
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
                raise NotKeptError(f"GPU {gpu.label}: {name} ({process.pid}) holds memory of it")
    bench.cell("del held")
    if owners and not is_shown:
        raise NotTriedError("the driver does not show processes here, as in many containers")
    return Found(f"{len(found)} GPUs, {len(family)} processes of ours")


@check(limit_s=60.0)
def group(bench: Bench) -> Found:
    """NCCL among ranks that have a GPU each, else gloo"""
    cards = {rank.gpu.parent_uuid or rank.gpu.uuid for rank in bench.pool.ranks if rank.gpu}
    expected = "nccl" if len(cards) == bench.n else "gloo"
    found = bench.call(cells.group_seen)
    if bench.pool.backend != expected or any(expected not in seen[0] for seen in found.values()):
        raise NotKeptError(f"it should be {expected}: {bench.pool.backend}, {found[0][0]}")
    return Found(f"{found[0][1]}, {found[0][0]}")


@check(limit_s=60.0)
def loopback(bench: Bench) -> Found:
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
        raise NotKeptError(", ".join(is_open))
    return Found(f"{number} ports, all at 127.0.0.1", ports=number)


@check(limit_s=90.0)
def all_reduce(bench: Bench) -> Found:
    """right sums of five number formats"""
    num_mib = 64 if bench.on_gpus else 4
    found = bench.call(cells.sums, num_mib * cells.MIB)
    wrong = {rank: names for rank, (names, _) in found.items() if names}
    if wrong:
        raise NotKeptError(f"wrong sums by rank: {wrong}")
    if bench.n == 1:
        return Found("one rank")
    # as NCCL's own tests count it: what each rank has to send and receive
    bus = min(speed for _, speed in found.values()) * 2 * (bench.n - 1) / bench.n
    return Found(f"{num_mib} MiB at {bus:.2g} GB/s (bus)", bus_gb_s=bus)


@check(limit_s=90.0)
def stop(bench: Bench) -> Found:
    """every rank is gone, from its GPU too"""
    if not bench.is_up:
        raise NotTriedError("there is no pool")
    pids = set(bench.pids().values())
    began = time.monotonic()
    bench.stop()
    seconds = time.monotonic() - began
    alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    if alive:
        raise NotKeptError(f"ranks that still run: {alive}")
    left = [p.pid for gpu in gpupool.gpus() for p in gpu.processes if p.pid in pids]
    if left:
        raise NotKeptError(f"processes that the driver still shows: {left}")
    return Found(f"{seconds:.1f} s", stop_s=seconds)


class Home:
    """What lay in the home, and where this process runs, before anything was started."""

    def __init__(self) -> None:
        self._before = set(_files())

    def check(self) -> Check[Bench]:
        """The check that nothing has come since."""

        @check(limit_s=60.0)
        def home(bench: Bench) -> Found:
            """no file is left in the home or the folder of the moment"""
            new = sorted(set(_files()) - self._before)
            if new:
                raise NotKeptError(", ".join(str(path) for path in new[:3]))
            return Found(f"{len(self._before)} files, as before")

        return home


def _files() -> Iterator[Path]:
    """Where torch, NCCL, ipyparallel and a kernel that dumps core leave files.

    Only there: other programs of this user write to the home at the same time.
    """
    home = Path.home()
    yield from _below(home / ".cache" / "torch", _DEPTH)
    for name in ("log", "pid", "security"):
        yield from _below(home / ".ipython" / "profile_default" / name, 0)
    for folder in (home, Path.cwd()):
        yield from (path for path in _listed(folder) if path.name.startswith(("core.", "nccl_")))


def _below(folder: Path, depth: int) -> Iterator[Path]:
    for path in _listed(folder):
        if not path.is_dir():
            yield path
        # these two are caches on purpose: compiled kernels, and weights that a user asks for
        elif depth and path.name not in ("kernels", "hub"):
            yield from _below(path, depth - 1)


def _listed(folder: Path) -> Iterable[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # it is not there, or not ours
        return ()


FIRST: tuple[Check[Bench], ...] = (
    start,
    machine,
    pinning,
    holders,
    group,
    loopback,
    all_reduce,
)
