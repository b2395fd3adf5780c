"""Whether a pool comes up on several hosts, stage by stage. Runs on the client.

python -m gpupool check lab
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import gpupool
from gpupool.check import cells
from gpupool.check.promise import Found, Line, NotKeptError, Verdict
from gpupool.core.errors import (
    CredentialsError,
    GpuPoolError,
    OptionsError,
    PlacementError,
    PoolError,
)

if TYPE_CHECKING:
    from gpupool import Pool

_NUM_MIB = 64
_STARTS = "the hosts are there, and a pool starts on them"


def versions(pool: Pool) -> Found:
    """the same Python, gpupool and torch everywhere"""
    found = {host.name: ", ".join(map(" ".join, host.versions.items())) for host in pool.hosts()}
    if len(set(found.values())) > 1:
        raise NotKeptError(_listed(found))
    return Found(next(iter(found.values()), "this machine alone"))


def gpus(pool: Pool) -> Found:
    """every host has GPUs, or none has"""
    counts = {host.name: Counter(host.gpus).items() for host in pool.hosts()}
    found = {name: ", ".join(f"{n} x {gpu}" for gpu, n in of) for name, of in counts.items()}
    some = any(found.values()) and not all(found.values())
    return Found(_listed({name: text or "none" for name, text in found.items()}), is_note=some)


def address(pool: Pool) -> Found:
    """every host has an address that the others reach"""
    return Found(_listed({one.name: f"{one.address} ({one.interface})" for one in pool.hosts()}))


def pairs(pool: Pool) -> Found:
    """each pair of hosts was connected when the pool started"""
    number = len(pool.hosts())
    return Found(f"{number * (number - 1) // 2} pairs")


def group(pool: Pool) -> Found:
    """the process group is formed"""
    kind = pool.run(cells.group_seen, timeout_s=60.0)[0][1]
    chosen = _listed({host.name: host.nccl for host in pool.hosts() if host.nccl})
    return Found("; ".join(filter(None, [f"{pool.world_size} ranks, {kind}", chosen])))


def all_reduce(pool: Pool) -> Found:
    """right sums over all ranks"""
    found = pool.run(cells.sums, _NUM_MIB * cells.MIB, timeout_s=300.0)
    if wrong := {rank: names for rank, (names, _) in found.items() if names}:
        raise NotKeptError(f"wrong sums by rank: {wrong}")
    # as NCCL's own tests count it: what each rank has to send and receive
    share = 2 * (pool.world_size - 1) / pool.world_size
    bus = share * min(speed for _, speed in found.values())
    return Found(f"{_NUM_MIB} MiB at {bus:.2g} GB/s (bus)")


def run(name: str, url: str | None = None) -> int:
    """Start a pool on `name`, try it and stop it: a line for each stage, up to one that fails.

    Args:
        url: "s3://...", of which the first rank of each host lists a page.

    Returns:
        The exit status: 1 if a stage failed.

    Raises:
        OptionsError: the name or the URL is wrong; nothing was started.
    """
    if url is not None and not url.startswith("s3://"):
        raise OptionsError(f"--url {url}: must be in S3, as s3://bucket/folder.")

    def s3(pool: Pool) -> Found:
        """the bucket can be listed from every host"""
        if "AWS_ACCESS_KEY_ID" not in os.environ:  # a host may have a role of its own
            with contextlib.suppress(CredentialsError):
                pool.propagate_env(aws=True)
        first = [rank.rank for rank in pool.ranks if rank.local_rank == 0]
        found = pool.run(cells.names_in_page, url, ranks=first, timeout_s=120.0)
        return Found(f"{found[first[0]]} names in a page of {url}")

    stages = [versions, gpus, address, pairs, group, all_reduce, *([s3] if url else [])]
    keys = [key for key in os.environ if url and key.startswith("AWS_")]
    began = time.monotonic()
    try:
        pool = gpupool.start(name, env=keys, progress=_tell)
    except OptionsError:
        raise
    except GpuPoolError as error:
        of_rank = isinstance(error, PoolError) and error.ranks
        where = "gpus" if isinstance(error, PlacementError) else "group" if of_rank else "starter"
        _show(where, _STARTS, "FAIL", str(error), began)
        return 1
    with pool:
        hosts = f"{len(pool.hosts()) or 1} hosts, {pool.world_size} ranks"
        _show("starter", _STARTS, "ok", hosts, began)
        return int(not all(_holds(stage, pool) for stage in stages))


def _holds(stage: Callable[[Pool], Found], pool: Pool) -> bool:
    """Try a stage and show its line; whether it has not failed."""
    began = time.monotonic()
    verdict: Verdict
    try:
        found = stage(pool)
        verdict = "note" if found.is_note else "ok"
    except (NotKeptError, GpuPoolError) as error:
        verdict, found = "FAIL", Found(str(error))
    name = stage.__name__.replace("_", "-")
    _show(name, stage.__doc__ or "", verdict, found.text, began)
    return verdict != "FAIL"


def _show(stage: str, promise: str, verdict: Verdict, text: str, began: float) -> None:
    print(Line(stage, promise, verdict, text, time.monotonic() - began), flush=True)


def _tell(stage: str) -> None:
    """How far the start is, for who waits for a queue."""
    print(f"      {stage}", file=sys.stderr, flush=True)


def _listed(by_host: Mapping[str, str]) -> str:
    return "; ".join(f"{host}: {text}" for host, text in by_host.items())
