"""What a parser of foreign bytes may do: take a second of CPU, 256 MiB, and raise our errors."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from pathlib import Path

from hypothesis import HealthCheck, settings

from gpupool.core.errors import GpuPoolError

MAX_CPU_S = 1.0
MAX_MEMORY_KIB = 256 * 1024

fuzzed = settings(
    max_examples=200,
    deadline=None,  # CPU time is what counts: the machine may be busy
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
"""The same 200 cases on each run, so that a change fails its own run and not a later one's."""


@contextlib.contextmanager
def only_our_errors() -> Iterator[None]:
    """Let the block end well or with a GpuPoolError of plain text, within the limits.

    What other threads of the tests compute, and the collection of other tests' garbage, do not
    count.
    """
    gc.disable()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here: proc(5)
        memory, began = _status_kib("VmRSS"), time.thread_time()
        try:
            yield
        except GpuPoolError as error:
            assert_plain(str(error))
        assert time.thread_time() - began < MAX_CPU_S
        assert _status_kib("VmHWM") - memory < MAX_MEMORY_KIB
    finally:
        gc.enable()


def assert_plain(message: str) -> None:
    """A terminal shows this as it is: no control character but the end of a line."""
    assert all(letter.isprintable() or letter == "\n" for letter in message), repr(message)


def _status_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
