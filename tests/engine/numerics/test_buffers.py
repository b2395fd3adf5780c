"""Buffers that ranks cannot exchange are refused; a last batch too small for norms is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpupool import SpmdError, TrainingOptions
from gpupool.engine.group.forming import World
from gpupool.engine.numerics.batch_norm import sync_batch_norm
from gpupool.engine.numerics.ddp import StepBuffers
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


@pytest.mark.parametrize(
    ("num", "size", "ranks", "norm", "better"),
    [
        (1347, 64, 2, "local", 62),  # 3 are left; 63 leaves 24 and 62 leaves 45
        (129, 64, 1, "local", 51),
        (1347, 64, 2, "sync", None),
        (1344, 64, 2, "local", None),
        (1352, 64, 2, "local", None),  # 8 are left: 4 on a rank
        (9, 8, 2, "local", None),  # all batches are small
        (3, 64, 2, "local", None),  # there is no other batch
    ],
)
def test_a_last_batch_of_a_few_is_reported_with_a_better_size(
    num: int, size: int, ranks: int, norm: Any, better: int | None
) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    if norm == "sync":
        model = sync_batch_norm(model)
    options = TrainingOptions(batch_size=size, batch_norm=norm)
    told = StepBuffers(model, World(0, ranks, torch.device("cpu")), options).trouble(num)
    assert (f"batch_size={better} " in told) if better else not told
