"""What the notebook does while ranks are lost and replaced: nothing waits for ever or goes astray."""

from __future__ import annotations

import logging
import os
import signal
import threading

import pytest

import gpupool
from gpupool import Pool
from gpupool.pool import session
from gpupool.pool.recovery import Recovery
from gpupool.pool.turns import Turns
from tests.pool.processes import engine_pid, until

SUM = "x = torch.ones(1); dist.all_reduce(x); x.item()"
SOON_S = 30.0


@pytest.fixture
def pool3() -> Pool:
    """Three CPU ranks."""
    pool = session.find()
    if pool is None or pool.status().state != "idle" or pool.world_size != 3:
        session.stop()
        pool = gpupool.start(n=3, device="cpu")
    return pool


def lose(pool: Pool, rank: int) -> None:
    """Kill a rank, and wait until the pool knows."""
    pid = engine_pid(pool, rank)
    os.kill(pid, signal.SIGKILL)
    until(lambda: pool.status().pids.get(rank) != pid, SOON_S)


def test_a_value_that_is_put_while_a_rank_is_replaced_is_on_the_new_one_too(pool3: Pool) -> None:
    lose(pool3, 1)
    pool3["put_meanwhile"] = 5
    assert dict(pool3.run("put_meanwhile")) == {0: 5, 1: 5, 2: 5}


def test_a_rank_is_replaced_while_a_value_waits_to_be_sent(pool3: Pool) -> None:
    running = pool3.begin("import time; time.sleep(2)", ranks=(0, 2), on_output=lambda *_: None)
    sent: list[object] = []
    sender = threading.Thread(target=lambda: sent.append(pool3.put(list(range(9)))), daemon=True)
    sender.start()
    until(lambda: pool3.turns.are_in_use([1]), SOON_S)  # it waits for ranks 0 and 2
    lose(pool3, 1)
    sender.join(SOON_S)
    assert len(sent) == 1
    assert running.error() is None
    assert dict(pool3.run(len, sent[0])) == {0: 9, 1: 9, 2: 9}


def test_nobody_waits_for_a_replacement_that_cannot_be(caplog: pytest.LogCaptureFixture) -> None:
    def replace() -> None:
        raise OSError("no space left")

    recovery = Recovery(Turns(lambda: None), replace)
    with caplog.at_level(logging.ERROR, "gpupool"):
        recovery.begin(0, 1)
        waiting = threading.Thread(target=recovery.wait, daemon=True)
        waiting.start()
        waiting.join(SOON_S)
    assert not waiting.is_alive()
    assert "no space left" in caplog.text
