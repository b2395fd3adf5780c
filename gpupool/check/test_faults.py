"""Faults: each is provoked, and costs what was promised. Runs on the client."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from gpupool import Pool, SpmdError
from gpupool.check import cells
from gpupool.check.bench import HANG_AFTER_S, SUM, Tell, Unharmed

_FREED_S = 40.0  # within which a stop must have ended a cell
_REACHED_S = 2.0  # after which ranks have come to where they wait
_FILL = """
def fill():
    local = []
    while True:
        local.append(torch.ones(2**26, dtype=torch.uint8, device=device))
        if device.type == "cpu":  # more than addresses: the machine need not be filled for it
            local.append(torch.ones(2**50, dtype=torch.uint8))
        local.append(torch.empty(2**30, dtype=torch.uint8, device=device))
if rank == world_size - 1:  # the error of an interrupted rank would keep what that has allocated
    fill()
"""
# What ranks hang in. A GPU takes about a thousand launches; then the host waits within the launch
# itself ("queue"). The others wait in Python, as those do that compute.
_HANGS = {
    "item": """
if rank == 0:
    x = torch.ones(1, device=device)
    dist.all_reduce(x)
    x.item()
while True: time.sleep(0.05)
""",
    "all": """
x = torch.ones(1, device=device)
if rank == 0:
    dist.all_reduce(x)
else:
    dist.recv(x, src=0)
x.item()
""",
    "queue": """
if rank == 0:
    x = torch.ones(1, device=device)
    works = [dist.all_reduce(x, async_op=True) for _ in range(20)]
    works[-1 if device.type == "cpu" else 0].wait()
    for _ in range(20_000): x = x + 1
while True: time.sleep(0.05)
""",
}


def _begun(
    pool: Pool, source: str, on_notice: Callable[[str | None], None] = lambda text: None
) -> Any:
    return pool.begin(
        f"import time\n{source}",
        ranks=range(pool.world_size),
        on_output=lambda *_: None,
        on_notice=on_notice,
    )


def test_mistake(pool: Pool, last: int, unharmed: Unharmed, tell: Tell) -> None:
    """a rank raises, and those that wait for it in a collective are freed"""
    began = time.monotonic()
    with pytest.raises(SpmdError) as caught:
        pool.run(f"if rank == {last}:\n    raise ValueError('on purpose')\n{SUM}", timeout_s=60)
    seconds = time.monotonic() - began
    assert (caught.value.first.rank, caught.value.first.ename) == (last, "ValueError")
    tell(f"reported after {seconds:.1f} s, the group works {unharmed():.1f} s later")


@pytest.mark.usefixtures("last")
@pytest.mark.parametrize("hang", _HANGS)
def test_abort(pool: Pool, unharmed: Unharmed, hang: str, tell: Tell) -> None:
    """stop frees ranks that wait: for a value, all at once, or behind a full queue"""
    execution = _begun(pool, _HANGS[hang])
    # Nothing says from outside that a rank waits within NCCL; it takes milliseconds.
    assert not execution.wait(_REACHED_S), f"it ended without being stopped: {execution.error()}"
    began = time.monotonic()
    execution.interrupt()
    assert execution.wait(_FREED_S), f"it still runs {_FREED_S:.0f} s after it was stopped"
    seconds = time.monotonic() - began
    tell(f"after {seconds:.1f} s, the group works {unharmed():.1f} s later")


@pytest.mark.usefixtures("last")
def test_hang(pool: Pool, tell: Tell) -> None:
    """a hang is reported while it lasts, with the collective of each rank"""
    notices: list[str | None] = []
    source = f"if rank:\n    time.sleep({3 * HANG_AFTER_S})\n{SUM}"
    execution = _begun(pool, source, notices.append)
    assert execution.wait(_FREED_S), "a cell that only sleeps did not end"
    found = [text for text in notices if "all_reduce" in str(text)]
    assert found, f"no collective is named in {notices}"
    tell(str(found[0]).split("\n")[0][:200])


def test_own_cell(pool: Pool, tell: Tell) -> None:
    """a cell ends when its work on the device ends"""
    # What a cell leaves to the device is seen by the next one, which has to wait for it.
    queued = max(pool.run(cells.queue_work).values())
    rest = max(pool.run(cells.seconds_to_finish).values())
    words = f"queued in {queued:.2f} s, {rest:.2f} s left for the next cell"
    assert rest <= 0.3, words
    tell(words)


def test_memory(pool: Pool, on_gpus: bool, unharmed: Unharmed, tell: Tell) -> None:
    """running out of memory costs one cell"""
    free = pool.run(cells.free_memory)
    with pytest.raises(SpmdError) as caught:
        pool.run(_FILL, timeout_s=60)
    first = caught.value.first
    kinds = ("OutOfMemoryError",) if on_gpus else ("RuntimeError", "MemoryError")
    assert first.ename in kinds, f"it is reported as {first}"
    unharmed()
    now = pool.run(cells.free_memory)
    lost = max(free[rank] - now[rank] for rank in free) / 2**30
    assert lost <= 1.0, f"{lost:.1f} GiB are not free again"
    tell(f"all but {max(lost, 0.0):.2f} GiB are free again")


def test_broken_rank(pool: Pool, on_gpus: bool, unharmed: Unharmed, tell: Tell) -> None:
    """what breaks a rank's GPU or process costs that rank, and no other"""
    broken = pool.world_size - 1
    with pytest.raises(SpmdError) as caught:
        pool.run(cells.break_rank, ranks=[broken], timeout_s=60)
    if on_gpus:
        first = caught.value.first
        assert "CUDA" in first.evalue, f"it is reported as {first}"
        assert "context" in first.hint, "that the context of the GPU is lost is not reported"
    tell(f"replaced in {unharmed(broken):.1f} s")


def test_kill(pool: Pool, unharmed: Unharmed, tell: Tell) -> None:
    """kill -9 of a rank while the others wait for it in a collective"""
    killed = pool.world_size - 1
    execution = _begun(pool, _HANGS["item"])
    execution.wait(_REACHED_S)
    began = time.monotonic()
    os.kill(pool.status().pids[killed], signal.SIGKILL)
    assert execution.wait(_FREED_S), f"the other ranks are not freed within {_FREED_S:.0f} s"
    freed = time.monotonic() - began
    error = execution.error()
    assert error is not None
    assert (error.first.rank, error.first.ename) == (killed, "EngineDiedError")
    unharmed(killed)
    seconds = time.monotonic() - began
    tell(f"others freed after {freed:.1f} s, all ranks there after {seconds:.1f} s")
