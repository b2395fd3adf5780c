"""What is asked for while ranks are lost and replaced does not wait for ever, nor go astray."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from gpupool import Pool, SpmdError
from gpupool.core.wire.requests import Answer, Where
from tests.support.processes import engine_pid, kill, reach, reached, until
from tests.support.waits import until_there

SUM = "x = torch.ones(1); dist.all_reduce(x); x.item()"
SOON_S = 30.0


def test_ranks_that_a_stop_ends_run_what_is_to_run_at_exit(pool3: Pool, tmp_path: Path) -> None:
    pool3.run(f"import atexit; atexit.register(lambda: {reach(tmp_path / 'rank')})")
    pool3.stop()
    assert reached(tmp_path / "rank", 0, 1, 2)


def test_a_rank_is_replaced_while_a_value_waits_to_be_sent(pool3: Pool, tmp_path: Path) -> None:
    go = tmp_path / "go"
    running = pool3.begin(until_there(go), ranks=(0, 2), on_output=lambda *_: None)
    sent: list[object] = []
    sender = threading.Thread(target=lambda: sent.append(pool3.put(list(range(9)))), daemon=True)
    sender.start()
    until(lambda: pool3._all_ranks.turns.are_in_use([1]), SOON_S)  # it waits for ranks 0 and 2
    kill(pool3, 1)
    go.touch()
    sender.join(SOON_S)
    assert len(sent) == 1
    assert running.error() is None
    assert dict(pool3.run(len, sent[0])) == {0: 9, 1: 9, 2: 9}


def test_a_question_to_a_rank_that_dies_is_answered(pool3: Pool) -> None:
    pid = engine_pid(pool3, 1)
    os.kill(pid, signal.SIGSTOP)
    answer = pool3.engines.control(Where(), [1])[1]
    os.kill(pid, signal.SIGKILL)
    assert answer.result(SOON_S) == Answer("died")


def test_what_follows_a_broken_group_waits_its_turn_while_another_cell_runs(
    pool3: Pool, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    pool3.run("pair = dist.new_group([0, 1])")
    running = pool3.begin(until_there(go), ranks=(2,), on_output=lambda *_: None)
    with pytest.raises(SpmdError, match="ZeroDivisionError"):
        pool3.run("if rank == 0: 1 / 0\ndist.barrier(pair)", ranks=[0, 1])
    following = pool3.begin("1", ranks=(0,), on_output=lambda *_: None)
    assert following.waits_for == ["the forming of the process group"]
    go.touch()
    assert following.wait(SOON_S)
    assert (running.error(), following.error()) == (None, None)
    assert dict(pool3.run(SUM)) == {0: 3.0, 1: 3.0, 2: 3.0}
