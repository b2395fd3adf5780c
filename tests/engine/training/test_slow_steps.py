"""Reports by the clock: a step is seen when it is over, a Stop heard, and no bit depends on it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpupool import TrainingHistory, TrainingOptions, TrainingRun
from gpupool.engine.training.callbacks import CallbackInfo
from tests.support.pools import Pools
from tests.support.trainings import network, samples, train_on, weights

pytestmark = pytest.mark.long


class Slow(nn.Module):
    def __init__(self, seconds: float, first: int = 1, last: int = 10**6) -> None:
        super().__init__()
        self.inner, self.seconds, self.first, self.last = network(), seconds, first, last
        self.num_calls = 0

    def forward(self, inputs: Tensor) -> Any:
        self.num_calls += 1
        if self.training and self.first <= self.num_calls <= self.last:
            time.sleep(self.seconds)
        return self.inner(inputs)


def begun(pool: Any, model: nn.Module, num: int, **settings: Any) -> tuple[TrainingRun, list[int]]:
    """A training of `num` samples, and the numbers of steps that its views see, in turn."""
    seen: list[int] = []

    def listen(history: TrainingHistory) -> None:
        seen.append(len(history.steps))

    options = TrainingOptions(batch_size=4, epochs=1, **settings)
    job = (pool, model, samples(num), "cross_entropy", options, None)
    return TrainingRun(*job, show=lambda run: run.add_listener(listen)), seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_slow_step_is_seen_when_it_is_over(pools: Pools, ranks: int) -> None:
    run, seen = begun(pools[ranks], Slow(0.8), 16)
    assert run.result().stopped_by == "epochs"
    assert sorted(set(seen)) == [0, 1, 2, 3, 4]


def test_a_stop_is_heard_after_the_slow_step_that_runs(pools: Pools) -> None:
    run, _ = begun(pools[2], Slow(2.0), 400)
    run.add_listener(lambda history: run.stop() if len(history.steps) == 1 else None)
    result = run.result()
    assert result.stopped_by == "user"
    assert len(result.history.steps) in (2, 3)  # the next one may have begun


def follow_the_loss(info: CallbackInfo) -> bool:
    """A callback that sets the learning rate by the loss it reads, and ends training."""
    if info.event == "step" and info.last is not None:
        for group in info.optimizer.param_groups:
            group["lr"] = info.last.loss / 10
    return info.event == "step" and info.step == 9


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_bit_depends_on_how_long_steps_last(pools: Pools, ranks: int) -> None:
    settings: dict[str, Any] = {"batch_size": 4, "epochs": 1}
    results = [
        train_on(pools[ranks], model, samples(64), callbacks=[follow_the_loss], **settings)
        for model in (Slow(0.0), Slow(0.4, first=2, last=8))
    ]
    assert [result.stopped_by for result in results] == ["callback"] * 2
    assert [len(result.history.steps) for result in results] == [11, 11]  # with the next report
    assert torch.equal(*(weights(result.model) for result in results))
    assert results[0].history.loss == results[1].history.loss
