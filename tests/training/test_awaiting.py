"""The notebook's stop button while `await run` waits: it stops the training, not the waiting."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from gpupool.core.errors import SpmdError
from gpupool.core.options.training_options import TrainingOptions
from gpupool.pool.calls.presses import SAME_WISH_S, heard_by
from gpupool.pool.pool import Pool
from gpupool.training.run import TrainingRun
from tests.support.pools import Pools
from tests.support.trainings import Slow, network


def long_run(pool: Pool, sample_s: float) -> TrainingRun:
    options = TrainingOptions(batch_size=4, epochs=10_000, shuffle="never")
    return TrainingRun(pool, network(), Slow(64, sample_s), "cross_entropy", options, None)


async def until_it_has_begun(run: TrainingRun) -> None:
    while run.history.start is None:
        await asyncio.sleep(0.01)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_press_stops_an_awaited_training_and_the_network_is_kept(pools: Pools) -> None:
    run = long_run(pools[2], sample_s=0.001)

    async def awaited() -> Any:
        await until_it_has_begun(run)
        asyncio.get_running_loop().call_later(0.1, press)
        return await run

    before = signal.getsignal(signal.SIGINT)
    assert asyncio.run(awaited()).stopped_by == "user"
    assert signal.getsignal(signal.SIGINT) is before


def test_presses_at_once_mean_one_and_a_later_one_ends_it_at_once(pools: Pools) -> None:
    run = long_run(pools[2], sample_s=2.0)  # the first step is far away

    async def awaited() -> Any:
        await until_it_has_begun(run)
        pressing = asyncio.create_task(press_again_and_again())
        try:
            return await run
        finally:
            pressing.cancel()

    with pytest.raises(SpmdError):
        asyncio.run(awaited())


async def press_again_and_again() -> None:
    for wait_s in (0.0, 0.1, SAME_WISH_S + 0.2):
        await asyncio.sleep(wait_s)
        press()


def test_an_older_handler_that_is_put_back_late_passes_presses_on() -> None:
    heard: list[str] = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append("before"))
    try:
        with heard_by(lambda first: heard.append(f"first {first}")):
            mine = signal.getsignal(signal.SIGINT)
            press()
            press()
            signal.signal(signal.SIGINT, signal.default_int_handler)  # another cell begins
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, mine)  # it has ended, and puts back what it found
        press()
        assert signal.getsignal(signal.SIGINT) is not mine
        press()
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == ["first True", "before", "before"]
