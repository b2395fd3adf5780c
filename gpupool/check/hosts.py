"""Whether a pool comes up on several hosts, stage by stage. Runs on the client.

python -m gpupool check lab
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator

import gpupool
from gpupool.check import cells
from gpupool.core import errors

STAGES = (
    *("starter", "Python and versions", "GPUs", "address", "pairs of hosts", "group"),
    *("all_reduce", "S3"),
)
_NUM_MIB = 64
_PAGE = """import fsspec
files, root = fsspec.url_to_fs({url!r})
bucket, _, prefix = root.partition("/")
files.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix)["KeyCount"]"""


def run(name: str, url: str | None = None) -> int:
    """Start a pool on `name`, try it and stop it: a line for each stage, up to one that fails.

    Args:
        url: "s3://...", of which the first rank of each host lists a page.

    Returns:
        The exit status: 1 if a stage failed.

    Raises:
        OptionsError: nothing was started.
    """
    number, began = 0, time.monotonic()

    def show(verdict: str, text: str) -> None:
        seconds = time.monotonic() - began
        print(f"{verdict:>4}  {STAGES[number]} ({seconds:.1f} s): {text}", flush=True)

    try:
        for found in _tried(name, url):
            show("ok", found)
            number, began = number + 1, time.monotonic()
    except errors.OptionsError:
        raise
    except errors.GpuPoolError as error:
        if isinstance(error, errors.PlacementError):
            number = STAGES.index("GPUs")
        show("FAIL", str(error))
        return 1
    return 0


def _tried(name: str, url: str | None) -> Iterator[str]:
    """What was found of each of `STAGES`, in this order; raises the error of one that fails."""
    keys = [key for key in os.environ if url and key.startswith("AWS_")]
    tell = functools.partial(print, "     ", file=sys.stderr, flush=True)  # who waits for a queue
    with gpupool.start(name, env=keys, progress=tell) as pool:
        n, hosts = pool.world_size, pool.hosts()
        names = [one.name for one in hosts]
        yield f"{len(hosts) or 1} hosts, {n} ranks"
        versions = [", ".join(map(" ".join, one.versions.items())) for one in hosts]
        if len({*versions}) > 1:
            raise errors.PoolError(_listed(names, versions))
        yield versions[0] if hosts else "this machine alone"
        counts = [Counter(one.gpus).items() for one in hosts]
        yield _listed(names, [", ".join(f"{k} x {gpu}" for gpu, k in of) for of in counts])
        yield _listed(names, [f"{one.address} ({one.interface})" for one in hosts])
        yield f"{len(hosts) * (len(hosts) - 1) // 2}, connected when the pool started"
        yield str(pool.run(cells.group_seen, timeout_s=60.0)[0][1])
        sums = pool.run(cells.sums, _NUM_MIB * cells.MIB, timeout_s=300.0)
        if wrong := {rank: names for rank, (names, _) in sums.items() if names}:
            raise errors.PoolError(f"wrong sums by rank: {wrong}")
        # as NCCL's own tests count it: what each rank has to send and receive
        bus = min(speed for _, speed in sums.values()) * 2 * (n - 1) / n
        chosen = {one.nccl for one in pool.hosts() if one.nccl}
        yield ", ".join([f"{_NUM_MIB} MiB at {bus:.2g} GB/s (bus)", *sorted(chosen)])
        if url:
            if "AWS_ACCESS_KEY_ID" not in keys:  # a host may have a role of its own
                with contextlib.suppress(errors.CredentialsError):
                    pool.propagate_env(aws=True)
            first = [rank.rank for rank in pool.ranks if rank.local_rank == 0]
            page = pool.run(_PAGE.format(url=url), ranks=first, timeout_s=120.0)
            yield f"{page[first[0]]} names in a page of {url}"


def _listed(names: Iterable[str], texts: Iterable[str]) -> str:
    found = zip(names, texts, strict=True)
    return "; ".join(f"{name}: {text or 'none'}" for name, text in found) or "this machine"
