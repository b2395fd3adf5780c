"""Buffers are the first rank's on all ranks; those that ranks cannot exchange are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpupool import SpmdError
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on

DOUBLE = torch.float64


class Counting(nn.Module):
    """Scales by what it has counted so far, which is another number on each rank."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2, dtype=dtype))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen += (inputs > 0).sum().to(self.seen.dtype)
        return inputs * (1 + 0.01 * self.seen[0].abs().to(inputs.dtype))


def counting_network(dtype: torch.dtype) -> nn.Module:
    model = nn.Sequential(Counting(dtype), network(DOUBLE))
    model.places = nn.Parameter(torch.arange(4).to(dtype), requires_grad=False)
    return model


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_complex_buffers_are_shared_as_whole_numbers_are(pools: Pools, num_ranks: int) -> None:
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 12, "accumulate": 2}
    trained = [
        train_on(
            pools[num_ranks],
            counting_network(kind),
            samples(31, DOUBLE),
            validation=samples(9, DOUBLE, seed=1),
            **settings,
        )
        for kind in (torch.complex64, torch.int64)
    ]
    ours, expected = (result.model.state_dict() for result in trained)
    assert ours["0.seen"].dtype == ours["places"].dtype == torch.complex64
    assert ours["0.seen"][0].abs() > 0
    for name, value in expected.items():
        assert torch.equal(ours[name], value.to(ours[name].dtype)), name
    assert trained[0].history.loss == trained[1].history.loss


@pytest.mark.parametrize("what", ["parameter", "buffer"])
def test_numbers_that_ranks_cannot_exchange_are_refused_before_training(
    pools: Pools, what: str
) -> None:
    model = network(DOUBLE)
    if what == "buffer":
        model.register_buffer("table", torch.zeros(2, dtype=torch.int16))
    else:
        model.table = nn.Parameter(torch.zeros(2, dtype=torch.int16), requires_grad=False)
    with raises(SpmdError, "table", " int16", ename="TrainingError"):
        train_on(pools[2], model, samples(8, DOUBLE), batch_size=4)
    result = train_on(pools[1], model, samples(8, DOUBLE), batch_size=4)
    assert result.model.state_dict()["table"].dtype == torch.int16
