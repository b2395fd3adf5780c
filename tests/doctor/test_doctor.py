"""Verdicts of what ranks report, and what is measured on ranks: scaling, the machine, operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gpupool
from gpupool import Pool, TrainingOptions, TrainingRun
from gpupool.core.errors import OptionsError, PoolError
from gpupool.core.formatting import Table
from gpupool.core.wire.events import PHASES, RankEvent, StepEvent
from gpupool.notebook.magics import commands
from gpupool.notebook.monitor import result_view
from gpupool.notebook.monitor.words import training_text
from gpupool.notebook.page.markup import table_html
from gpupool.training import doctor, machine
from gpupool.training.doctor import Diagnosis, diagnose
from gpupool.training.history import TrainingHistory
from gpupool.training.scaling import Scaling, Size
from tests.doctor import planted
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import Slow, network, samples, train_on

USUAL = {"data": 1.0, "compute": 90.0, "exchange": 4.0, "optimizer": 3.0, "rest": 2.0}


def history(*ranks: dict[str, float], num_steps: int = 40, step_s: float = 0.1) -> TrainingHistory:
    found = TrainingHistory()
    for step in range(1, num_steps + 1):
        found.add(StepEvent(step, 1, 0.5, None, 0.1, 8, 0.1 * step))
    for rank, more in enumerate(ranks):
        spent = {**USUAL, **more}
        found.add(RankEvent(rank, num_steps, step_s, step_s, spent=spent))
    return found


@pytest.mark.parametrize(
    ("ranks", "verdict", "rank", "cause"),
    [
        ([{}, {}], "balanced", None, ""),
        ([{"data": 60.0}, {"data": 55.0}], "data", None, ""),
        ([{"compute": 40.0, "exchange": 54.0}, {}], "slow rank", 1, "compute"),
        ([{"exchange": 49.0, "compute": 45.0}] * 2, "communication", None, ""),
        ([{"callbacks": 40.0}] * 2, "callbacks", None, ""),
        ([{"validating": 70.0}] * 2, "validating", None, ""),
        ([{"saving": 60.0, "exchange": 4.0}, {"exchange": 64.0}], "saving", None, ""),
        ([{}], "balanced", None, ""),
        ([{}, {"compute": 40.0, "data": 50.0}], "data", None, ""),  # nobody waits for rank 1
    ],
)
def test_a_verdict(ranks: list[dict[str, float]], verdict: str, rank: Any, cause: str) -> None:
    found = diagnose(history(*ranks))
    assert (found.verdict, found.rank, found.cause) == (verdict, rank, cause)
    assert found.next_step
    assert found.share >= doctor.WORTH or verdict == "balanced"
    assert found.sentence in repr(found)


def test_a_short_step_is_too_small_and_three_steps_say_nothing() -> None:
    small = {"compute": 20.0, "rest": 60.0, "exchange": 12.0}
    found = diagnose(history(small, small, step_s=0.002))
    assert found.verdict == "too small"
    assert found.sentence == "A step is so short (2 ms) that 75 % of it is the same for any batch."
    found = diagnose(history({}, {}, num_steps=3))
    assert (found.verdict, found.next_step) == ("unknown", "train longer: max_steps=100 is enough.")
    assert diagnose(TrainingHistory()).verdict == "unknown"


def test_one_rank_has_no_communication_and_its_optimizer_is_no_short_step() -> None:
    large = {"compute": 84.0, "exchange": 0.0, "optimizer": 15.0, "rest": 0.0, "data": 1.0}
    found = diagnose(history(large, step_s=0.003))
    assert found.sentence == "Nothing stands out: 84 % of the time is computing."
    assert "waiting for data 1 %, computing 84 %, optimizer 15 %" in repr(found)


@pytest.mark.parametrize("name", ["heavy callback", "neighbour on one rank"])
def test_a_planted_cause_is_found(pools: Pools, name: str) -> None:
    (case,) = (case for case in planted.cases() if case.name == name)
    found = planted.examined(case, pools[2])
    assert (found.verdict, found.rank, found.cause) == case.said


def test_a_result_has_shares_a_verdict_and_the_dearest_operators(
    pools: Pools, tmp_path: Path
) -> None:
    result = train_on(pools[2], network(), samples(400), batch_size=8, profile=str(tmp_path))
    assert set(result.shares.by_rank) <= {0, 1}
    for of_rank in result.shares.by_rank.values():
        assert sum(of_rank.values()) == pytest.approx(1.0)
        assert tuple(of_rank) == PHASES
    assert isinstance(result.doctor(), Diagnosis)
    assert result.profile is not None
    dearest = [float(cpu) + float(gpu) for _, _, cpu, gpu, _ in result.profile.rows]
    assert len(result.profile.rows) == 10
    assert dearest == sorted(dearest, reverse=True)
    assert len(list(tmp_path.glob("rank-*.pt.trace.json.gz"))) == 2


# ---- scaling -------------------------------------------------------------------------------------


def test_scaling_trains_on_the_first_ranks_and_compares(pools: Pools) -> None:
    model = network()
    before = [one.clone() for one in model.parameters()]
    options = TrainingOptions(batch_size=8)
    found = gpupool.scaling(model, samples(64), options, repeats=1, steps=20, pool=pools[3])
    assert [(one.num_ranks, one.batch_size) for one in found.sizes] == [(1, 8), (2, 16), (3, 24)]
    assert found.speedup(found.sizes[0]) == found.efficiency(found.sizes[0])[0] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    strong = gpupool.scaling(
        model, samples(64), options, (3,), "strong", repeats=1, steps=20, pool=pools[3]
    )
    assert [(one.num_ranks, one.batch_size) for one in strong.sizes] == [(3, 8)]
    assert dict(pools[3].run("rank")) == {0: 0, 1: 1, 2: 2}  # and the pool is as it was


def test_the_sentence_of_scaling_names_what_takes_the_time() -> None:
    def size(num: int, rate: float, exchange: float) -> Size:
        shares = {**dict.fromkeys(PHASES, 0.0), "compute": 1 - exchange, "exchange": exchange}
        return Size(num, 8 * num, (rate, rate * 0.98, rate * 1.02), shares)

    found = Scaling("weak", (size(1, 100, 0), size(4, 360, 0.12), size(8, 690, 0.31)))
    assert found.sentence == "8 ranks give 6.9 x; from 4 on communication takes 31 %."
    assert found.efficiency(found.sizes[2]) == pytest.approx((0.8625, 0.84525, 0.87975))
    assert len(found.table()) == 3
    alone = Scaling("weak", (size(1, 5577, 0.16),))
    assert alone.sentence == "1 rank: 5,577 samples/s; computing 84 %, communication 16 %."
    assert "data:image/svg+xml" in result_view.scaling_html(alone)
    shown = result_view.scaling_html(found)
    assert found.sentence in shown
    assert "data:image/svg+xml" in shown


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ranks": (1, 4)}, "ranks=4"),
        ({"ranks": ()}, "ranks"),
        ({"steps": 3}, "steps=3"),
        ({"mode": "fast"}, "mode='fast'"),
    ],
)
def test_scaling_that_cannot_be_is_one_sentence(
    pools: Pools, wrong: dict[str, Any], said: str
) -> None:
    with raises(OptionsError, said):
        gpupool.scaling(network(), samples(64), pool=pools[2], **wrong)


# ---- the machine, and the magic ------------------------------------------------------------------


def test_the_machine_has_a_row_for_each_thing(pools: Pools, tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.bin").write_bytes(bytes(1000))
    found = machine.examine(pools[2], str(tmp_path))
    assert [what for what, _, _ in found.rows] == [
        *("GPUs", "cores", "shared memory", "all-reduce"),
        str(tmp_path),
    ]
    assert all(said for _, said, _ in found.rows)
    assert "all-reduce" in table_html(found)


def test_a_password_in_the_url_reaches_no_rank(pools: Pools) -> None:
    with raises(OptionsError, "s3://***@bucket") as caught:
        machine.examine(pools[2], "s3://me:c4n4ry@bucket/x")
    assert "c4n4ry" not in str(caught.value)


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        ("\tGPU0\tGPU1\tNIC0\nGPU0\t X \tPHB\tSYS\nGPU1\tPHB\t X \tSYS", "PCIe, through the CPU"),
        ("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15", ""),
        ("", ""),
    ],
)
def test_how_gpus_are_joined(matrix: str, words: str) -> None:
    assert machine.links_of(matrix) == words


def test_the_magic_looks_at_the_last_training_and_at_the_machine_before(
    pool2: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "last", None)
    assert isinstance(commands.run("doctor"), Table)
    monkeypatch.setattr(doctor, "last", history({}, {}))
    found = commands.run("doctor")
    assert isinstance(found, Diagnosis)
    assert found.verdict == "balanced"
    assert isinstance(commands.run("doctor machine"), Table)


def test_a_training_that_runs_has_a_verdict_too(pools: Pools) -> None:
    options = TrainingOptions(batch_size=4, epochs=10_000)
    run = TrainingRun(pools[2], network(), Slow(40, 0.002), "cross_entropy", options, None)
    try:
        assert isinstance(run.doctor(), Diagnosis)
        with raises(PoolError, "run.doctor()"):
            machine.examine(pools[2])
    finally:
        run.stop()
        run.result()


def test_the_picture_has_a_bar_for_each_rank_and_the_text_the_sentence() -> None:
    slow = history({"data": 60.0}, {"data": 55.0})
    found = diagnose(slow)
    assert found.sentence in training_text(slow)
    shown = result_view.diagnosis_html(found)
    assert shown.count('role="img"') == 2
    assert found.sentence in shown
