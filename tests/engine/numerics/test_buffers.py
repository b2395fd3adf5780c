"""Buffers that ranks cannot exchange are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpupool import SpmdError
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on


@pytest.mark.parametrize("what", ["parameter", "buffer"])
def test_numbers_that_ranks_cannot_exchange_are_refused_before_training(
    pools: Pools, what: str
) -> None:
    model, table = network(), torch.zeros(2, dtype=torch.int16)
    if what == "buffer":
        model.register_buffer("table", table)
    else:
        model.table = nn.Parameter(table, requires_grad=False)
    with raises(SpmdError, "table", " int16", ename="TrainingError"):
        train_on(pools[3], model, samples(8), batch_size=4)
    result = train_on(pools[1], model, samples(8), batch_size=4)
    assert result.model.state_dict()["table"].dtype == torch.int16
