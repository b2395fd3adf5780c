"""`python -m gpupool check`: pytest over the promises, or a pool by its name. On the client."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import gpupool
from gpupool.core.errors import CredentialsError, GpuPoolError, OptionsError, PoolError
from gpupool.core.machine.gpus import driver_version
from gpupool.core.machine.processes import versions

ABOUT = """\
Tries what gpupool promises on this machine: a line for each promise, with a figure, in two to four
minutes. It is pytest over gpupool/check (pip install 'gpupool[check]').
With a NAME: starts a pool there as %gpupool start NAME does, and has a line for each stage.

Run it where nobody else computes on these GPUs: ranks are killed, hang, and run out of memory on
purpose. Nothing is left behind. The exit status is 1 if a promise is not kept, and 2 or more if
that could not be tried, or was interrupted.
"""
_FILES = ("test_pool.py", "test_faults.py", "test_numbers.py")  # in this order
# What the folder of the moment has of pytest is another's, and nothing is left there.
_ARGUMENTS = (
    *("-c", os.devnull, "--noconftest", "--import-mode=importlib", "-p", "no:cacheprovider"),
    *("-vv", "--tb=short", "--no-header", "--disable-warnings"),
    *("--timeout=240", "--timeout-method=signal", "-p", "gpupool.check.bench"),
)
STAGES = ("starter", "versions", "GPUs", "address", "pairs of hosts", "group", "all_reduce", "S3")
_NUM_MIB = 64
_PAGE = """import fsspec
bucket, _, prefix = {place!r}.partition("/")
files = fsspec.filesystem("s3")
files.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix)["KeyCount"]"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="slurm, or a table of gpupool.toml")
    parser.add_argument("url", nargs="?", metavar="s3://...", help="list this on each host of NAME")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpu", action="store_true", help="all GPUs; the default if there are any")
    where.add_argument("--cpu", action="store_true", help="on two CPU ranks")
    parser.add_argument("-k", metavar="WORDS", help='such as "abort or kill": only these promises')


def run(chosen: argparse.Namespace) -> int:
    """Try the promises, or a pool on several hosts; gives the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # each cleans up, as Ctrl-C
        signal.signal(number, signal.default_int_handler)
    if chosen.name is not None:
        return _run_stages(chosen.name, chosen.url)
    if not (find_spec("pytest") and find_spec("pytest_timeout")):
        raise OptionsError("a check needs pytest: pip install 'gpupool[check]'")
    import pytest

    print(_machine(), flush=True)
    has_gpus = any(not gpu.unavailable for gpu in gpupool.gpus())
    on_gpus = chosen.gpu or (has_gpus and not chosen.cpu)
    where = {"device": "gpu"} if on_gpus else {"device": "cpu", "n": 2}
    arguments = [*_ARGUMENTS, "--where", json.dumps(where), "-k", chosen.k or ""]
    os.chdir(Path(__file__).parent)  # names of promises are without a path, then
    with tempfile.TemporaryDirectory(prefix="gpupool-check-") as folder:
        return int(pytest.main([*arguments, "--basetemp", f"{folder}/pytest", *_FILES]))


def _machine() -> str:
    """What a promise may depend on, for reports: nothing in it names a person or a computer."""
    import torch

    found = {**versions(), "CUDA": torch.version.cuda, "driver": driver_version()}
    if torch.distributed.is_nccl_available():  # it is linked to torch: no GPU is asked
        found["NCCL"] = ".".join(map(str, torch.get_device_module("cuda").nccl.version()))
    words = [f"{name} {version}" for name, version in found.items() if version]
    kinds = Counter(gpu.name for gpu in gpupool.gpus())
    words += [f"{number} x {name}" for name, number in kinds.items()] or ["no GPU"]
    return ", ".join([*words, f"{platform.system()} {platform.release()} {platform.machine()}"])


# ---- a pool by its name, on several hosts say ----------------------------------------------------


def _run_stages(name: str, url: str | None) -> int:
    """A line for each stage, up to one that fails; gives the exit status."""
    stages, began = iter(STAGES), time.monotonic()
    try:
        for found in _tried(name, url):
            seconds = time.monotonic() - began
            print(f"  ok  {next(stages)} ({seconds:.1f} s): {found}", flush=True)
            began = time.monotonic()
    except OptionsError:
        raise
    except GpuPoolError as error:
        print(f"FAIL  {next(stages)}: {error}", flush=True)
        return 1
    return 0


def _tried(name: str, url: str | None) -> Iterator[str]:
    """What was found of each of `STAGES`, in this order; raises the error of one that fails."""
    from gpupool.check import cells  # torch, which -h does not wait for

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
        yield f"{all_reduced(pool, _NUM_MIB)} {hosts[0].nccl if hosts else ''}".rstrip()
        if url is not None:
            with contextlib.suppress(CredentialsError):  # a host may have a role of its own
                pool.propagate_env(aws=True)
            first = [rank.rank for rank in pool.ranks if rank.local_rank == 0]
            source = _PAGE.format(place=url.removeprefix("s3://"))
            names = pool.run(source, ranks=first, timeout_s=120.0)
            yield f"{names[first[0]]} names in a page of {url}"


def all_reduced(pool: gpupool.Pool, num_mib: int) -> str:
    """How fast ranks sum so much, in words: on one rank nothing travels. PoolError: wrong sums."""
    from gpupool.check import cells

    found = pool.run(cells.sums, num_mib, timeout_s=300.0)
    if wrong := {rank: names for rank, (names, _) in found.items() if names}:
        raise PoolError(f"wrong sums by rank: {wrong}")
    rate = min(speed for _, speed in found.values())
    return f"{num_mib} MiB" + f" at {rate:.2g} GB/s (bus)" * (len(found) > 1)
