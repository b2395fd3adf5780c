"""How checks are run: verdicts, limits of time, and what is left of a check that hangs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupool.check.bench import SUM, Bench
from gpupool.check.numbers import LongTraining
from gpupool.check.pools import group, start
from gpupool.check.promise import Check, Found, NotKeptError, check
from gpupool.check.runner import Runner
from gpupool.pool import session
from tests.support.processes import gone, until

pytestmark = pytest.mark.long

CPU = {"device": "cpu", "n": 2}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    session.stop()
    bench = Bench(CPU, tmp_path)
    yield bench
    session.stop()


def verdicts(bench: Bench, *checks: Check[Bench], begin_within_s: float = 300.0) -> Runner:
    """The runner that has run these, with the start of a pool before them."""
    runner = Runner(bench, begin_within_s, lambda line: None)
    runner.run(start, checks, ())
    return runner


@check(limit_s=60.0)
def sums(bench: Bench) -> Found:
    """collectives give the right sums"""
    return Found("as they should", seconds=bench.healthy())


@check(limit_s=60.0)
def three_ranks(bench: Bench) -> Found:
    """there are three"""
    bench.needs_ranks(3)
    return Found()


@check(limit_s=60.0)
def other_sums(bench: Bench) -> Found:
    """collectives give another sum"""
    found = set(bench.cell(SUM).values())
    if found != {3.0}:
        raise NotKeptError(f"it is {found}")
    return Found()


@check(limit_s=60.0)
def cell_that_fails(bench: Bench) -> Found:
    """a cell divides by zero"""
    bench.cell("1 / 0")
    return Found()


@check(limit_s=60.0)
def mistaken(bench: Bench) -> Found:
    """this check itself is wrong"""
    raise ZeroDivisionError(str(bench.n))


@check(limit_s=1.5)
def endless(bench: Bench) -> Found:
    """a cell ends"""
    bench.cell("import time\ntime.sleep(3600)", limit_s=7200.0)
    return Found()


@check(limit_s=60.0)
def looked_at(bench: Bench) -> Found:
    """a figure for people"""
    return Found("half as fast", is_note=True, share=0.5)


def test_each_verdict_comes_of_what_was_found(bench: Bench) -> None:
    lines = verdicts(
        bench, sums, three_ranks, other_sums, cell_that_fails, mistaken, looked_at
    ).lines
    assert {line.name: line.verdict for line in lines} == {
        "start": "ok",
        "sums": "ok",
        "three-ranks": "skip",
        "other-sums": "FAIL",
        "cell-that-fails": "FAIL",
        "mistaken": "FAIL",
        "looked-at": "note",
    }
    texts = {line.name: line.text for line in lines}
    assert texts["three-ranks"] == "needs 3 ranks"
    assert texts["other-sums"] == "it is {2.0}"
    assert "ZeroDivisionError: division by zero" in texts["cell-that-fails"]
    assert texts["mistaken"].startswith("ZeroDivisionError at runner.py, line ")
    assert str(lines[-1]).endswith(": half as fast")
    assert lines[-1].figures == {"share": 0.5}


def test_a_network_that_is_one_step_behind_is_found(bench: Bench) -> None:
    training = LongTraining(bench)
    behind = bench.train(training.model, training.data, max_steps=9, **training.options).model
    with pytest.raises(NotKeptError, match=r"e-0\d apart, two undisturbed ones 0.0e\+00: its step"):
        training.compared(behind, 10, "its step")


def test_a_check_that_is_late_has_failed_and_the_next_has_another_pool(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    pids = bench.pids()
    runner = verdicts(bench, endless, sums)
    late, after = runner.lines[1:]
    assert (late.verdict, after.verdict) == ("FAIL", "ok")
    assert late.text.startswith("not done after 1.5 s")
    assert 1.5 <= late.seconds < 60
    assert not runner.is_stuck
    until(lambda: gone(*pids.values()), 5.0, "the end of the late ranks")
    stacks = capfd.readouterr().err
    assert "in endless" in stacks  # where the check stood
    assert "in _tried" in stacks  # and every other thread


def test_without_a_pool_nothing_else_is_tried(tmp_path: Path) -> None:
    session.stop()
    bench = Bench({"device": "gpu", "gpus": "97"}, tmp_path)  # which no machine has
    lines = verdicts(bench, sums, group).lines
    assert [line.verdict for line in lines] == ["FAIL", "skip", "skip"]
    assert "PlacementError: GPU '97' is not there" in lines[0].text
