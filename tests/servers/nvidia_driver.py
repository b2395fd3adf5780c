"""A driver of NVIDIA's for machines without one: a C library that nvidia-ml-py itself loads.

It stands in for the driver, not for our code. `DriverOn` has a process of its own, as the library
has to be found when a process starts; what a test asks for runs there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.environment import environment

GIB = 2**30
# in the place of a value: NVML's error of that number
NO_PERMISSION, LOST, MISMATCH = "!4", "!15", "!18"
_OURS = secrets.token_hex(6)  # other tests of this machine lock their GPUs too
UNSEEN_PID = 2**22 - 1  # no process has it: a driver would say so of another container's

Answer = TypeVar("Answer")
Values = Mapping[str, object]


def gpu(number: int, name: str = "NVIDIA H100 80GB HBM3", **others: object) -> dict[str, object]:
    """What the driver says of a GPU that nobody uses, with a UUID of its own for each number.

    `others` it says besides, or instead: memory=(used, total), compute={pid: bytes},
    mig={index: gpu(...)}, or `handle=NO_PERMISSION`.
    """
    said = {
        "uuid": f"GPU-{number:08x}-1111-2222-3333-{_OURS}",
        "name": name,
        "memory": (0, 80 * GIB),
        "utilization": 0,
        "temperature": 31,
        "capability": "9.0",
        "compute_mode": 0,
        "compute": {},
        "graphics": {},
        "mig_mode": 0,
    }
    return {**said, **others}


def mig_gpu(number: int, instances: Mapping[int, str], **others: object) -> dict[str, object]:
    """A GPU with MIG mode on, and its instances: index -> name. What is no index is a gap."""
    made = {
        index: {
            "uuid": f"MIG-{number:04x}{index:04x}-1111-2222-3333-{_OURS}",
            "name": name,
            "memory": (0, 20 * GIB),
            "compute": {},
        }
        for index, name in instances.items()
    }
    return gpu(number, mig_mode=1, mig_max=7, mig=made, **others)


class DriverOn:
    """The driver of one machine, and a process that uses it.

    `variables` are what a process needs to find the driver; one that starts with them has it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "machine"
        self.variables = {"LD_LIBRARY_PATH": str(folder), "NVIDIA_MACHINE": str(self._file)}
        self.show()
        own = {name: v for name, v in os.environ.items() if not name.startswith("CUDA_")}
        with environment({**own, **self.variables}):
            self._process = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
            self._process.submit(os.getpid).result()

    def show(self, *gpus: Values | str, **others: object) -> None:
        """From now on this is the machine; a text in a GPU's place is an error of all of it."""
        machine = {"count": len(gpus), "driver": "615.71", **others}
        lines: dict[str, object] = {}
        for key, said in (*machine.items(), *((f"gpu.{n}", said) for n, said in enumerate(gpus))):
            lines |= _flat(key, said)
        new = self._file.with_suffix(".new")
        new.write_text("".join(f"{key} {value}\n" for key, value in lines.items()))
        new.replace(self._file)  # never seen half

    def run(self, function: Callable[..., Answer], *args: object, **variables: str) -> Answer:
        """What a function returns in the process that has this driver, and has these variables."""
        return self._process.submit(_call, function, args, variables).result()

    def close(self) -> None:
        self._process.shutdown()


def _call(
    function: Callable[..., Answer], args: tuple[object, ...], variables: dict[str, str]
) -> Answer:
    with environment({**os.environ, **variables}):
        return function(*args)


@contextlib.contextmanager
def process_of_another_user() -> Iterator[int]:
    if os.geteuid() != 0:
        yield 1
        return
    process = subprocess.Popen(["sleep", "300"], user="nobody")
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _flat(key: str, said: Any) -> dict[str, object]:
    if not isinstance(said, Mapping):
        is_list = isinstance(said, Sequence) and not isinstance(said, str)
        return {key: " ".join(map(str, said)) if is_list else said}
    if key.endswith((".compute", ".graphics")):
        used = ("-" if num_bytes is None else num_bytes for num_bytes in said.values())
        return {key: " ".join(f"{pid}:{n}" for pid, n in zip(said, used, strict=True))}
    lines: dict[str, object] = {}
    for name, value in said.items():
        lines |= _flat(f"{key}.{name}", value)
    return lines


@pytest.fixture(scope="session")
def driver_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DriverOn]:
    """One for the whole run: it takes half a second to start. Skips where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler: cc or gcc")
    folder, source = tmp_path_factory.mktemp("driver"), Path(__file__).with_suffix(".c")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    with contextlib.closing(DriverOn(folder)) as driver:
        yield driver


@pytest.fixture
def driver(driver_process: DriverOn) -> DriverOn:
    """A driver that finds no GPU until `show`."""
    driver_process.show()
    return driver_process
