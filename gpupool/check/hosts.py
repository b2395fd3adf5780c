"""Whether a pool comes up on several hosts, stage by stage. Runs on the client.

python -m gpupool check lab
"""

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

STAGES = (
    *("starter", "Python and versions", "GPUs", "address", "pairs of hosts", "group"),
    *("all_reduce", "S3"),
)
_NUM_MIB = 64
_PAGE = """import fsspec
files = fsspec.filesystem("s3")
files.call_s3("list_objects_v2", Bucket={bucket!r}, Prefix={prefix!r})["KeyCount"]"""


def run(name: str, place: str = "") -> int:
    """Start a pool on `name`, try it and stop it: a line for each stage, up to one that fails.

    The first rank of each host lists a page of `place`, BUCKET or BUCKET/PREFIX. Gives the exit
    status; OptionsError: nothing was started.
    """
    stages, began = iter(STAGES), time.monotonic()

    def show(verdict: str, text: str) -> None:
        seconds = time.monotonic() - began
        print(f"{verdict:>4}  {next(stages)} ({seconds:.1f} s): {text}", flush=True)

    try:
        for found in _tried(name, place):
            show("ok", found)
            began = time.monotonic()
    except errors.OptionsError:
        raise
    except errors.GpuPoolError as error:
        show("FAIL", str(error))
        return 1
    return 0


def _tried(name: str, place: str) -> Iterator[str]:
    """What was found of each of `STAGES`, in this order; raises the error of one that fails."""
    tell = functools.partial(print, "     ", file=sys.stderr, flush=True)  # who waits for a queue
    with gpupool.start(name, progress=tell) as pool:
        n, hosts = pool.world_size, pool.hosts()
        yield f"{len(hosts) or 1} hosts, {n} ranks"
        yield ", ".join(map(" ".join, versions().items()))  # on all: else there is no pool
        for what in ("gpus", "address"):
            found = [f"{host.name}: {getattr(host, what) or 'none'}" for host in hosts]
            yield "; ".join(found) or "this machine alone"
        yield f"{len(hosts) * (len(hosts) - 1) // 2}, connected when the pool started"
        yield str(pool.run(cells.group_seen, timeout_s=60.0)[0][1])
        sums = pool.run(cells.sums, _NUM_MIB * cells.MIB, timeout_s=300.0)
        if wrong := {rank: names for rank, (names, _) in sums.items() if names}:
            raise errors.PoolError(f"wrong sums by rank: {wrong}")
        # as NCCL's own tests count it: what each rank has to send and receive
        bus = min(speed for _, speed in sums.values()) * 2 * (n - 1) / n
        by = hosts[0].nccl if hosts else ""
        yield f"{_NUM_MIB} MiB at {bus:.2g} GB/s (bus) {by}".rstrip()
        if place:
            with contextlib.suppress(errors.CredentialsError):  # a host may have a role of its own
                pool.propagate_env(aws=True)
            bucket, _, prefix = place.partition("/")
            first = [rank.rank for rank in pool.ranks if rank.local_rank == 0]
            page = pool.run(
                _PAGE.format(bucket=bucket, prefix=prefix), ranks=first, timeout_s=120.0
            )
            yield f"{page[first[0]]} names in a page of s3://{place}"
