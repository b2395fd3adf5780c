"""Ranks that wait for ever are told under the running cell, and freed if that is wanted."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest

from gpupool import Pool, SpmdError
from tests.support.processes import engine_pid, gone, until
from tests.support.raising import raises

SUM = "x = torch.ones(1); dist.all_reduce(x); x.item()"
HANG_AFTER_S = 1.5
Watched = Callable[[str], Pool]
MISMATCH = (
    "if rank == 0: dist.all_reduce(torch.ones(3))\n"
    "elif rank == 1: dist.broadcast(torch.ones(3), 0)\n"
    "else: dist.barrier()"
)


@pytest.fixture
def watched(pool3: Pool, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """The shared pool of three, made to "tell" of hangs soon, or to "abort" what hangs."""

    def watched(on_hang: str) -> Pool:
        options = replace(pool3.options, on_hang=on_hang, hang_after_s=HANG_AFTER_S)
        monkeypatch.setattr(pool3, "options", options)
        return pool3

    return watched


@pytest.mark.long
def test_a_cell_in_which_a_rank_never_comes_is_ended_and_names_every_rank(
    watched: Watched,
) -> None:
    pool = watched("abort")
    pool.run("kept = rank")
    with pytest.raises(SpmdError) as caught:
        pool.run("if rank != 1: dist.all_reduce(torch.ones(3))", timeout_s=40)
    first = caught.value.first
    assert first.ename == "HangError"
    assert first.evalue.startswith("ranks 0 and 2 have been waiting for rank 1 for ")
    assert "ranks 0 and 2 in all_reduce (" in first.evalue
    assert "rank 1 has already finished the cell" in first.evalue
    assert "torch/distributed" not in first.traceback  # the user's line, and nothing behind it
    assert dict(pool.run(f"{SUM}, kept")) == {0: (3.0, 0), 1: (3.0, 1), 2: (3.0, 2)}


@pytest.mark.long
def test_ranks_in_different_collectives_are_ended_too(watched: Watched) -> None:
    shown = ("rank 0 in all_reduce", "rank 1 in broadcast", "rank 2 in barrier")
    with raises(SpmdError, "", shown=shown, ename="HangError"):
        watched("abort").run(MISMATCH, timeout_s=40)
    assert dict(watched("abort").run(SUM)) == {0: 3.0, 1: 3.0, 2: 3.0}


@pytest.mark.long
@pytest.mark.parametrize("mode", ["tell", "abort"])
def test_tensors_that_do_not_go_together_are_told_and_ended(watched: Watched, mode: str) -> None:
    pool, said = watched(mode), list[str | None]()
    source = "x = torch.ones(4 if rank == 2 else 3); dist.all_reduce(x)"
    cell = pool.begin(source, ranks=[0, 1, 2], on_output=lambda *_: None, on_notice=said.append)
    if mode == "tell":
        until(lambda: "do not go together" in str(said), 20.0, "the diagnosis")
        assert "float32[4]" in str(said[-1])
        cell.interrupt()
    assert cell.wait(40.0)
    errors = " ".join(str(error) for error in cell.errors.values())
    assert ("do not go together" if mode == "abort" else "KeyboardInterrupt") in errors
    assert dict(pool.run(SUM)) == {0: 3.0, 1: 3.0, 2: 3.0}


LEFT = {
    "and computes": "dist.all_reduce(x)\nwhile rank != 2: time.monotonic()",
    "and is in the next one": "dist.all_reduce(x)\ndist.barrier()",
}


@pytest.mark.long
@pytest.mark.parametrize("left", LEFT)
def test_a_rank_that_has_left_a_collective_of_other_sizes_frees_who_is_left_in_it(
    watched: Watched, left: str
) -> None:
    pool = watched("abort")
    pool.run("kept = rank")
    source = f"import time\nx = torch.ones(4 if rank == 2 else 3)\n{LEFT[left]}"
    with pytest.raises(SpmdError) as caught:
        pool.run(source, timeout_s=40)
    first = caught.value.first
    assert first.ename == "HangError"
    assert "rank 2 with float32[4] (pool.run, line 3)" in first.evalue
    assert " with float32[3], and through it" in first.evalue
    assert dict(pool.run(f"{SUM}, kept")) == {0: (3.0, 0), 1: (3.0, 1), 2: (3.0, 2)}


@pytest.mark.long
def test_a_rank_that_waits_where_the_others_have_left_is_freed_also_if_sizes_are_equal(
    watched: Watched,
) -> None:
    pool = watched("abort")
    with raises(
        SpmdError,
        "",
        shown=("not called reduce alike", "rank 0 with float32[2]"),
        ename="HangError",
    ):
        pool.run("dist.reduce(torch.ones(2), 2 if rank == 0 else 0)", timeout_s=40)
    assert dict(pool.run(SUM)) == {0: 3.0, 1: 3.0, 2: 3.0}


@pytest.mark.long
def test_who_has_given_its_part_and_computes_does_not_end_who_waits_for_another(
    watched: Watched,
) -> None:
    end = f"time.monotonic() + {2 * HANG_AFTER_S}"
    compute = f"end = {end}\n    while time.monotonic() < end: pass\n"
    source = (
        f"import time\nx = torch.ones(2)\nif rank == 1:\n    {compute}"
        f"dist.reduce(x, 2)\nif rank == 0:\n    {compute}"
        "dist.all_reduce(torch.ones(1))\nrank"
    )
    assert dict(watched("abort").run(source, timeout_s=40)) == {0: 0, 1: 1, 2: 2}


@pytest.mark.long
@pytest.mark.parametrize("left", ["quit()", "import sys; sys.exit(0)"])
def test_a_rank_that_leaves_frees_those_that_wait_for_it(watched: Watched, left: str) -> None:
    pool = watched("tell")
    pool.run("kept = rank")
    source = f"import time\nif rank == 1:\n    {left}\nif rank == 2: time.sleep(600)\n{SUM}"
    with pytest.raises(SpmdError) as caught:
        pool.run(source, timeout_s=60)
    first = caught.value.first
    assert first.ename == "HangError"
    assert "rank 1 has left the cell by exit() or sys.exit()" in first.evalue
    assert dict(pool.run(f"{SUM}, kept")) == {0: (3.0, 0), 1: (3.0, 1), 2: (3.0, 2)}


@pytest.mark.long
def test_a_rank_that_leaves_does_not_cut_off_what_does_not_wait_for_it(
    watched: Watched,
) -> None:
    pool = watched("tell")
    sub = "pair = dist.new_group([0, 2])\nx = torch.ones(1)\n"
    source = f"import time\n{sub}if rank == 1:\n    exit()\ntime.sleep(2 * (rank == 0))\n"
    done = pool.run(f"{source}dist.all_reduce(x, group=pair)\nx.item()")
    assert dict(done) == {0: 2.0, 1: None, 2: 2.0}


def test_unless_it_is_wanted_a_hang_is_told_and_the_cell_goes_on_until_it_is_stopped(
    watched: Watched,
) -> None:
    pool = watched("tell")
    said: list[str | None] = []
    cell = pool.begin(MISMATCH, ranks=[0, 1, 2], on_output=lambda *_: None, on_notice=said.append)
    hang = "Hang: the ranks have been in different collectives"
    until(lambda: str(said[-1:]).startswith(f"['{hang}"), 20.0, "the diagnosis")
    assert "rank 1 in broadcast (" in str(said[-1])
    assert not cell.done()
    cell.interrupt()
    assert cell.wait(30.0)
    assert said[-1] is None
    ended = [str(cell.errors[rank]) for rank in range(3)]
    assert ended == [f"KeyboardInterrupt: in {op}" for op in ("all_reduce", "broadcast", "barrier")]


@pytest.mark.long
def test_rpc_that_one_rank_does_not_shut_down_is_ended(watched: Watched) -> None:
    begin = "import torch.distributed.rpc as rpc\nrpc.init_rpc(str(rank), rank=rank, world_size=3)"
    with raises(SpmdError, "", shown=" rank 2 ", ename="HangError") as caught:
        watched("abort").run(f"{begin}\nif rank != 2: rpc.shutdown()", timeout_s=60)
    assert "ranks 0 and 1 in rpc.shutdown (pool.run, line 3)" in caught.value.first.evalue
    after = f"if rank == 2: rpc.shutdown(graceful=False)\n{SUM}"
    assert dict(watched("abort").run(after)) == {0: 3.0, 1: 3.0, 2: 3.0}


def test_a_long_computation_is_no_hang(watched: Watched) -> None:
    pool = watched("abort")
    end = f"time.monotonic() + {2 * HANG_AFTER_S}"
    code = f"import time\nend = {end}\nwhile time.monotonic() < end: pass\nrank"
    said: list[str | None] = []
    cell = pool.begin(code, ranks=[0, 1, 2], on_output=lambda *_: None, on_notice=said.append)
    assert {rank: reply.text for rank, reply in cell.result().items()} == {
        0: "0", 1: "1", 2: "2"
    }  # fmt: skip
    assert said == []


@pytest.mark.long
@pytest.mark.usefixtures("short_ladder")
def test_a_frozen_rank_is_told_and_replaced_when_the_cell_is_stopped(
    watched: Watched,
) -> None:
    pool = watched("tell")
    victim = engine_pid(pool, 1)
    said: list[str | None] = []
    cell = pool.begin(
        "import time; time.sleep(600)",
        ranks=[0, 1, 2],
        on_output=lambda *_: None,
        on_notice=said.append,
    )
    until(lambda: pool.status().state == "busy", 5.0)
    os.kill(victim, signal.SIGSTOP)
    until(lambda: bool(said), 20.0, "the warning")
    assert "Rank 1" in str(said[0])
    assert f"kill -CONT {victim}" in str(said[0])
    cell.interrupt()
    until(lambda: "does not respond" in str(said), 10.0, "the word before it is killed")
    cell.interrupt()
    assert cell.wait(30.0)
    assert dict(pool.run(SUM)) == {0: 3.0, 1: 3.0, 2: 3.0}
    assert gone(victim)
