"""The command: its options, what it prints, and its exit status. Runs on the client.

python -m gpupool check --gpu
python -m gpupool check lab
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import gpupool
from gpupool.check import hosts
from gpupool.check.bench import Bench
from gpupool.check.faults import FAULTS
from gpupool.check.numbers import NUMBERS
from gpupool.check.pools import FIRST, Home, stop
from gpupool.check.promise import Check, Line
from gpupool.check.report import Report, this_machine
from gpupool.check.runner import STOP_S, Runner
from gpupool.core.errors import OptionsError
from gpupool.core.options.pool_options import Device, seconds_argument, suggest

SECONDS = 240.0
INTERRUPTED = 130  # as shells say it of a program that SIGINT has ended
_START, *_REST = FIRST
CHECKS: tuple[Check[Bench], ...] = (*_REST, *FAULTS, *NUMBERS)
"""What is between the start of the pool and its stop."""


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
        "--only",
        nargs="+",
        type=_name,
        metavar="NAME",
        help="only checks whose names begin so, such as abort, kill or bits",
    )
    parser.add_argument(
        "--seconds",
        type=seconds_argument,
        metavar="SECONDS",
        help=f"begin no check later than this: {SECONDS:g}",
    )
    parser.add_argument(
        "--json", dest="as_json", action="store_true", help="print the report as JSON"
    )


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
    device: Device = "auto",
    gpus: str | None = None,
    only: Sequence[str] = (),
    seconds: float = SECONDS,
    as_json: bool = False,
) -> int:
    """Check what gpupool promises, in this process, which has no pool; gives the exit status.

    Args:
        device: "gpu", "cpu", or "auto": GPUs if there are any.
        gpus: the GPUs to use, as for `gpupool.start`.
        only: names of checks, or their beginnings; all if empty.
        seconds: no check begins later than that.
        as_json: stdout gets the report as JSON, and stderr the lines.

    Raises:
        OptionsError: the options contradict each other; nothing was started.
    """
    if gpus is not None and device == "auto":
        device = "gpu"
    if device == "auto":
        device = "gpu" if any(not gpu.unavailable for gpu in gpupool.gpus()) else "cpu"
    where: dict[str, Any] = {"device": "gpu"} if device == "gpu" else {"device": "cpu", "n": 2}
    if gpus is not None:
        where["gpus"] = gpus
        gpupool.PoolOptions(device=device, gpus=(gpus,))  # raises where they exclude each other
    chosen = [one for one in CHECKS if not only or any(one.name.startswith(n) for n in only)]
    return _run(where, chosen, seconds, as_json)


def _run(where: dict[str, Any], chosen: list[Check[Bench]], seconds: float, as_json: bool) -> int:
    out: TextIO = sys.stderr if as_json else sys.stdout  # a program reads nothing but the JSON
    device = {"gpu": "GPU", "cpu": "CPU"}[where["device"]]
    # If the main thread itself should hang, in a print or in the driver: nothing stays for ever.
    longest_s = max(one.limit_s for one in (_START, stop, *chosen))
    faulthandler.dump_traceback_later(seconds + 2 * longest_s + 4 * STOP_S, exit=True)
    home, began = Home(), time.monotonic()  # before torch is imported, which could write there
    report = Report(this_machine(), device, [])
    print(report.machine, file=out, flush=True)

    def show(line: Line) -> None:
        print(line, file=out, flush=True)

    with tempfile.TemporaryDirectory(prefix="gpupool-check-") as folder, _ended_by_signals():
        runner = Runner(Bench(where, Path(folder)), seconds, show)
        report.lines = runner.lines
        try:
            runner.run(_START, chosen, (stop, home.check()))
        except KeyboardInterrupt:
            report.interrupted = True
        finally:
            runner.close()
    report.seconds = time.monotonic() - began
    print(report.summary(), file=out, flush=True)
    if as_json:
        print(report.to_json(), flush=True)
    faulthandler.cancel_dump_traceback_later()
    status = INTERRUPTED if report.interrupted else report.status
    if runner.is_stuck:
        _leave(status)
    return status


def _leave(status: int) -> None:
    """End without waiting for threads that nothing ends; the starter ends the ranks."""
    import os

    os._exit(status)


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


def _name(text: str) -> str:
    names = [one.name for one in CHECKS]
    if not any(name.startswith(text) for name in names):
        raise argparse.ArgumentTypeError(f"{text!r} is unknown. {suggest(text, names)}")
    return text
