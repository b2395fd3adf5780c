"""Buffers are the first rank's on all ranks; those that ranks cannot exchange are refused."""

from __future__ import annotations

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


def test_complex_buffers_are_shared_as_whole_numbers_are(pools: Pools) -> None:
    trained = []
    for kind in (torch.complex64, torch.int64):
        model = nn.Sequential(Counting(kind), network(DOUBLE))
        data, held = samples(31, DOUBLE), samples(9, DOUBLE, seed=1)
        trained.append(
            train_on(pools[3], model, data, validation=held, epochs=2, batch_size=12, accumulate=2)
        )
    ours, expected = (result.model.state_dict() for result in trained)
    assert ours["0.seen"].dtype == torch.complex64
    assert ours["0.seen"][0].abs() > 0
    for name, value in expected.items():
        assert torch.equal(ours[name], value.to(ours[name].dtype)), name
    assert trained[0].history.loss == trained[1].history.loss


@pytest.mark.parametrize("what", ["parameter", "buffer"])
def test_numbers_that_ranks_cannot_exchange_are_refused_before_training(
    pools: Pools, what: str
) -> None:
    model, table = network(DOUBLE), torch.zeros(2, dtype=torch.int16)
    if what == "buffer":
        model.register_buffer("table", table)
    else:
        model.table = nn.Parameter(table, requires_grad=False)
    with raises(SpmdError, "table", " int16", ename="TrainingError"):
        train_on(pools[3], model, samples(8, DOUBLE), batch_size=4)
    result = train_on(pools[1], model, samples(8, DOUBLE), batch_size=4)
    assert result.model.state_dict()["table"].dtype == torch.int16
