"""Whether a pool comes up on several hosts, stage by stage. Runs on the client."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Iterator

import gpupool
from gpupool.check import cells
from gpupool.core import errors
from gpupool.core.machine.processes import versions

STAGES = ("starter", "versions", "GPUs", "address", "pairs of hosts", "group", "all_reduce", "S3")
_NUM_MIB = 64
_PAGE = """import fsspec
bucket, _, prefix = {place!r}.partition("/")
files = fsspec.filesystem("s3")
files.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix)["KeyCount"]"""


def run(name: str, url: str | None) -> int:
    """Start a pool on `name`, try it and stop it: a line for each stage, up to one that fails.

    The first rank of each host lists a page of `url`. Gives the exit status.
    """
    stages, began = iter(STAGES), time.monotonic()
    try:
        for found in _tried(name, url):
            seconds = time.monotonic() - began
            print(f"  ok  {next(stages)} ({seconds:.1f} s): {found}", flush=True)
            began = time.monotonic()
    except errors.OptionsError:
        raise
    except errors.GpuPoolError as error:
        print(f"FAIL  {next(stages)}: {error}", flush=True)
        return 1
    return 0


def _tried(name: str, url: str | None) -> Iterator[str]:
    """What was found of each of `STAGES`, in this order; raises the error of one that fails."""
    tell = functools.partial(print, "     ", file=sys.stderr, flush=True)  # who waits for a queue
    with gpupool.start(name, progress=tell) as pool:
        hosts = pool.hosts()
        yield f"{len(hosts) or 1} hosts, {pool.world_size} ranks"
        yield ", ".join(map(" ".join, versions().items()))  # on all: else there is no pool
        for what in ("gpus", "address"):
            found = [f"{host.name}: {getattr(host, what) or 'none'}" for host in hosts]
            yield "; ".join(found) or "this machine alone"
        yield f"{len(hosts) * (len(hosts) - 1) // 2}, connected when the pool started"
        yield str(pool.run(cells.group_seen, timeout_s=60.0)[0][1])
        sums = pool.run(cells.sums, _NUM_MIB, timeout_s=300.0)
        if wrong := {rank: names for rank, (names, _) in sums.items() if names}:
            raise errors.PoolError(f"wrong sums by rank: {wrong}")
        bus = min(speed for _, speed in sums.values())
        yield f"{_NUM_MIB} MiB at {bus:.2g} GB/s (bus) {hosts[0].nccl if hosts else ''}".rstrip()
        if url is not None:
            with contextlib.suppress(errors.CredentialsError):  # a host may have a role of its own
                pool.propagate_env(aws=True)
            first = [rank.rank for rank in pool.ranks if rank.local_rank == 0]
            source = _PAGE.format(place=url.removeprefix("s3://"))
            names = pool.run(source, ranks=first, timeout_s=120.0)
            yield f"{names[first[0]]} names in a page of {url}"
