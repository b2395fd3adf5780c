"""Faults: each is provoked, and costs what was promised. Runs on the client."""

from __future__ import annotations

import os
import signal
import time

import pytest

from gpupool.check import cells
from gpupool.check.bench import HANG_AFTER_S, SUM, Bench, Kept, Tell
from gpupool.core.errors import SpmdError

_FREED_S = 40.0  # within which a stop must have ended a cell
_REACHED_S = 2.0  # after which ranks have come to where they wait
_AT_EASE_S = 0.3  # as late may a cell end whose device has been waited for
_GIB = 1 << 30
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


@pytest.mark.timeout(60)
def test_mistake(bench: Bench, tell: Tell) -> None:
    """a rank raises, and those that wait for it in a collective are freed"""
    bench.needs_ranks()
    kept, began = Kept(bench), time.monotonic()
    error = bench.error_of(f"if rank == world_size - 1:\n    raise ValueError('on purpose')\n{SUM}")
    seconds = time.monotonic() - began
    assert (error.first.rank, error.first.ename) == (bench.last, "ValueError")
    again = bench.healthy()
    kept.compare()
    tell(f"reported after {seconds:.1f} s, the group works {again:.1f} s later")


def _stopped(bench: Bench, tell: Tell, source: str) -> None:
    """Stop a cell that hangs: it ends, and the ranks keep their variables."""
    bench.needs_ranks()
    kept = Kept(bench)
    execution = bench.begin(source)
    # Nothing says from outside that a rank waits within NCCL; it takes milliseconds.
    assert not execution.wait(_REACHED_S), f"it ended without being stopped: {execution.error()}"
    began = time.monotonic()
    execution.interrupt()
    assert execution.wait(_FREED_S), f"it still runs {_FREED_S:.0f} s after it was stopped"
    seconds = time.monotonic() - began
    again = bench.healthy()
    kept.compare()
    tell(f"after {seconds:.1f} s, the group works {again:.1f} s later")


@pytest.mark.timeout(150)
def test_abort_item(bench: Bench, tell: Tell) -> None:
    """stop frees a rank that waits for the value of a collective"""
    _stopped(
        bench,
        tell,
        """
        import time
        if rank == 0:
            x = torch.ones(1, device=device)
            dist.all_reduce(x)
            x.item()
        while True:
            time.sleep(0.05)
        """,
    )


@pytest.mark.timeout(150)
def test_abort_all(bench: Bench, tell: Tell) -> None:
    """stop frees them also when every rank waits in a collective"""
    _stopped(
        bench,
        tell,
        """
        x = torch.ones(1, device=device)
        if rank == 0:
            dist.all_reduce(x)
        else:
            dist.recv(x, src=0)
        x.item()
        """,
    )


@pytest.mark.timeout(150)
def test_abort_queue(bench: Bench, tell: Tell) -> None:
    """stop frees a rank that has queued much behind a collective"""
    # A GPU takes about a thousand launches; then the host waits within the launch itself. The other
    # ranks wait in Python, as those do that compute.
    _stopped(
        bench,
        tell,
        """
        import time
        if rank == 0:
            x = torch.ones(1, device=device)
            works = [dist.all_reduce(x, async_op=True) for _ in range(20)]
            works[-1 if device.type == "cpu" else 0].wait()
            for _ in range(20_000):
                x = x + 1
        while True:
            time.sleep(0.05)
        """,
    )


@pytest.mark.timeout(100)
def test_hang(bench: Bench, tell: Tell) -> None:
    """a hang is reported while it lasts, with the collective of each rank"""
    bench.needs_ranks()
    notices: list[str] = []

    def on_notice(text: str | None) -> None:
        notices.extend([text] if text else [])

    source = f"import time\nif rank:\n    time.sleep({3 * HANG_AFTER_S})\n{SUM}"
    execution = bench.begin(source, on_notice)
    try:
        assert execution.wait(_FREED_S), "a cell that only sleeps did not end"
    finally:
        execution.interrupt()
    found = [text for text in notices if "all_reduce" in text]
    assert found, f"no collective is named in {notices[-1:]}"
    tell(found[0].split("\n")[0][:200])


@pytest.mark.timeout(90)
def test_own_cell(bench: Bench, tell: Tell) -> None:
    """a cell ends when its work on the device ends"""
    # What a cell leaves to the device is seen by the next one, which has to wait for it.
    queued = max(bench.call(cells.queue_work, 1.0).values())
    rest = max(bench.call(cells.seconds_to_finish).values())
    words = f"queued in {queued:.2f} s, {rest:.2f} s left for the next cell"
    assert rest <= _AT_EASE_S, words
    if bench.n > 1:
        kept = Kept(bench)
        source = "if rank == 0:\n    dist.all_reduce(torch.ones(1, device=device))"
        with pytest.raises(SpmdError):
            bench.cell(source, limit_s=4.0)
        bench.healthy()
        kept.compare()
        words += "; a collective that nobody joins fails its own cell"
    tell(words)


@pytest.mark.timeout(180)
def test_memory(bench: Bench, tell: Tell) -> None:
    """running out of memory costs one cell"""
    kept, free = Kept(bench), bench.call(cells.free_memory)
    error = bench.error_of(_FILL)
    kinds = ("OutOfMemoryError",) if bench.on_gpus else ("RuntimeError", "MemoryError")
    assert error.first.ename in kinds, f"it is reported as {error.first}"
    bench.healthy()
    kept.compare()
    now = bench.call(cells.free_memory)
    lost = max(free[rank] - now[rank] for rank in free) / _GIB
    assert lost <= 1.0, f"{lost:.1f} GiB are not free again"
    tell(f"all but {max(lost, 0.0):.2f} GiB are free again")


@pytest.mark.timeout(180)
def test_broken_rank(bench: Bench, tell: Tell) -> None:
    """what breaks a rank's GPU or process costs that rank, and no other"""
    kept = Kept(bench)
    with pytest.raises(SpmdError) as caught:
        bench.pool.run(cells.break_rank, ranks=[bench.last], timeout_s=60.0)
    if bench.on_gpus:
        first = caught.value.first
        assert "CUDA" in first.evalue, f"it is reported as {first}"
        assert "context" in first.hint, "that the context of the GPU is lost is not reported"
    seconds = bench.healthy(120.0)
    kept.compare(replaced=bench.last)
    tell(f"replaced in {seconds:.1f} s")


@pytest.mark.timeout(240)
def test_kill(bench: Bench, tell: Tell) -> None:
    """kill -9 of a rank while the others wait for it in a collective"""
    kept = Kept(bench)
    execution = bench.begin(
        """
        import time
        if rank != world_size - 1:
            x = torch.ones(2**20, device=device)
            dist.all_reduce(x)
            x.sum().item()
        while True:
            time.sleep(0.05)
        """
    )
    execution.wait(_REACHED_S)
    began = time.monotonic()
    os.kill(kept.pids[bench.last], signal.SIGKILL)
    assert execution.wait(_FREED_S), f"the other ranks are not freed within {_FREED_S:.0f} s"
    freed = time.monotonic() - began
    error = execution.error()
    assert error is not None
    assert (error.first.rank, error.first.ename) == (bench.last, "EngineDiedError")
    bench.healthy(120.0)
    seconds = time.monotonic() - began
    kept.compare(replaced=bench.last)
    tell(f"others freed after {freed:.1f} s, all ranks there after {seconds:.1f} s")
