"""How each rank fares: who is slowest, on a real pool; and what it costs nobody."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from gpupool.core.wire.events import ProgressEvent
from gpupool.data.device import Mark
from gpupool.engine.probe.rank_report import WorkTimer
from gpupool.training.history import TrainingHistory
from tests.engine.training.test_option_effects import trained
from tests.support.pools import Pools
from tests.support.trainings import network, samples, train_on

SLOW_RANK = 1


class Sleeps(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, inputs: Tensor) -> Tensor:
        if torch.distributed.get_rank() != SLOW_RANK:
            return inputs
        if self.where == "forward":
            time.sleep(0.5)
        elif inputs.requires_grad:
            inputs.register_hook(lambda gradient: time.sleep(0.5))
        return inputs


@pytest.mark.long
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_rank_that_is_slow_is_told_and_only_it(pools: Pools, where: str) -> None:
    # long sleeps: on a busy machine each rank may take some tenths of a second for its own work
    first, *others = network().children()
    model = nn.Sequential(first, Sleeps(where), *others)
    history = train_on(pools[3], model, samples(120), epochs=1, batch_size=12).history
    assert {event.step for event in history.ranks.values()} == {10}
    work = {rank: event.work_s or 0.0 for rank, event in history.ranks.items()}
    # the others wait, and that is no work of theirs
    assert min(event.step_s or 0.0 for event in history.ranks.values()) > 0.4
    assert max(work[0], work[2]) < 0.7 * work[SLOW_RANK]
    for event in history.ranks.values():
        assert 0 <= (event.utilization or 0.0) <= 1
        assert 50 << 20 < (event.memory_bytes or 0) < (event.total_memory_bytes or 0)


class At(Mark):
    def __init__(self, at_s: float) -> None:
        self._at_s = at_s


def test_a_step_is_cut_into_its_phases() -> None:
    now = [0.0]
    timer = WorkTimer(lambda: At(now[0]), lambda: now[0])
    for seconds in (1.0, 2.0, 9.0):
        timer.begin_step()
        now[0] += seconds / 2
        timer.end("data")
        now[0] += seconds / 2  # forward, backward
        weight = torch.ones(1, requires_grad=True)
        objective = (weight * 2).sum()
        timer.begin_backward(objective)
        objective.backward()
        now[0] += 5.0  # the others
        timer.end_backward()
        now[0] += 0.5  # the optimizer
        timer.end("optimizer")
        now[0] += 0.25  # what ranks report to each other
        timer.end_step()
    with timer.beside("saving"):
        now[0] += 3.0
    half = {"exchange": 5.0, "optimizer": 0.5, "callbacks": 0.0, "rest": 0.25}
    beside = {"validating": 0.0, "saving": 0.0}
    assert timer.take() == [
        {"data": one, "compute": one, **half, **beside} for one in (0.5, 1.0, 4.5)
    ]
    assert timer.take() == []
    assert timer.seconds_beside == {"saving": 3.0}


class Patient(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            time.sleep(0.05)
        return super().forward(inputs)


def test_a_long_validation_tells_how_far_it_is_and_the_time_goes_on() -> None:
    settings = {"validation": samples(120), "batch_size": 10, "epochs": 2}
    history, lines, elapsed = TrainingHistory(), [], [0.0]
    for event in trained(Patient(8, 3), samples(20), **settings).events:
        history.add(event)
        elapsed.append(history.elapsed_s)
        if isinstance(event, ProgressEvent) and event.what == "validating":
            lines.append(history.line())
            assert elapsed[-1] > elapsed[-2]
    assert elapsed == sorted(elapsed)
    assert any("validating (" in line and "of 120 samples)" in line for line in lines)
    assert 2 <= len(lines) <= 2 + elapsed[-1] / 0.2
    assert history.stage == ""
