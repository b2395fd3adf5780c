"""The command: its options, and pytest over the promises. Runs on the client.

python -m gpupool check --gpu
python -m gpupool check lab
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import gpupool
from gpupool.check import hosts
from gpupool.core.errors import OptionsError
from gpupool.core.machine.nvml import driver_version

CANNOT = 126  # the status of a command that could not be run
INTERRUPTED = 130  # as shells say it of a program that SIGINT has ended
_STATUS = {2: INTERRUPTED, 3: CANNOT, 4: CANNOT, 5: CANNOT}  # of pytest's, but for 0 and 1
_FILES = ("test_pool.py", "test_faults.py", "test_numbers.py", "test_stop.py")  # in this order
# What the folder of the moment has of pytest is another's, and nothing is left there.
_ARGUMENTS = (
    *("-c", os.devnull, "--noconftest", "--import-mode=importlib", "-p", "no:cacheprovider"),
    *("-q", "--tb=short", "--no-header", "--disable-warnings", "--timeout-method=signal"),
    *("-p", "gpupool.check.plugin"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command can be given; what is not given is left out of the result."""
    parser.add_argument(
        "cluster",
        nargs="?",
        metavar="NAME",
        help="start a pool there instead, stage by stage: slurm, or a table of gpupool.toml",
    )
    parser.add_argument("url", nargs="?", metavar="s3://...", help="list this on each host")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--gpu",
        dest="device",
        action="store_const",
        const="gpu",
        help="check on GPUs; without this and --cpu: on GPUs if there are any",
    )
    where.add_argument(
        "--cpu", dest="device", action="store_const", const="cpu", help="check on two CPU ranks"
    )
    parser.add_argument("--gpus", metavar="GPUS", help="check on these GPUs, such as 0,2")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="only promises that have this in their names"
    )
    parser.add_argument("--junitxml", metavar="FILE", help="write the report there, for programs")


def run(cluster: str = "", url: str = "s3://", **options: Any) -> int:
    """What `run_here` does, or try a pool on several hosts: see `hosts.run`."""
    if not cluster:
        return run_here(**options)
    if options or not url.startswith("s3://"):
        raise OptionsError("check NAME takes an s3://... and nothing else.")
    with _ended_by_signals(), contextlib.suppress(KeyboardInterrupt):
        return hosts.run(cluster, url.removeprefix("s3://"))
    return INTERRUPTED


def run_here(
    device: Literal["auto", "cpu", "gpu"] = "auto",
    gpus: str | None = None,
    only: Sequence[str] = (),
    junitxml: str = "",
) -> int:
    """Check what gpupool promises, in this process, which has no pool; gives the exit status.

    Args:
        device: "gpu", "cpu", or "auto": GPUs if there are any.
        gpus: the GPUs to use, as for `gpupool.start`.
        only: names of promises, or parts of them; all if empty.
        junitxml: a file that gets the report.

    Raises:
        OptionsError: options contradict each other, or pytest is missing; nothing was started.
    """
    if not (find_spec("pytest") and find_spec("pytest_timeout")):
        raise OptionsError("a check needs pytest: pip install 'gpupool[check]'")
    import pytest

    if gpus is not None and device == "auto":
        device = "gpu"
    if device == "auto":
        device = "gpu" if any(not gpu.unavailable for gpu in gpupool.gpus()) else "cpu"
    where: dict[str, Any] = {"device": "gpu"} if device == "gpu" else {"device": "cpu", "n": 2}
    if gpus is not None:
        where["gpus"] = gpus
        gpupool.PoolOptions(device=device, gpus=(gpus,))  # raises where they exclude each other
    print(_machine(), flush=True)
    here = Path(__file__).parent
    arguments = [*_ARGUMENTS, "--rootdir", str(here), "--where", json.dumps(where)]
    if only:  # the pool starts and stops in any case
        names = ("start", "stop", *only)
        arguments += ["-k", " or ".join(f"test_{name}".replace("-", "_") for name in names)]
    if junitxml:
        arguments += ["--junitxml", os.path.abspath(junitxml)]
    with _ended_by_signals():
        status = int(pytest.main([*arguments, *(str(here / name) for name in _FILES)]))
    return _STATUS.get(status, status)


def _machine() -> str:
    """What a promise may depend on. Nothing in it names a person or a computer, so that it can be
    shown to others."""
    import torch
    import torch.distributed as dist

    # What is linked to torch says its own version: no GPU is asked.
    nccl = torch.get_device_module("cuda").nccl.version() if dist.is_nccl_available() else ()
    versions = {
        "gpupool": gpupool.__version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, nccl)),
        "driver": driver_version(),
    }
    words = [f"{name} {version}" for name, version in versions.items() if version]
    kinds = Counter(gpu.name for gpu in gpupool.gpus())
    words += [f"{number} x {name}" for name, number in kinds.items()] or ["no GPU"]
    return ", ".join([*words, f"{platform.system()} {platform.release()} {platform.machine()}"])


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A block in which whoever asks this process to end has it clean up, as Ctrl-C does."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
