"""Buffers of any number format are the first rank's on all ranks, and come back as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.pools import Pools
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
@pytest.mark.parametrize("dtype", [torch.int16, torch.complex64])
def test_what_gloo_has_no_name_for_is_shared_too(
    pools: Pools, num_ranks: int, dtype: torch.dtype
) -> None:
    """As whole numbers of 64 bits are, by DDP itself."""
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 12, "accumulate": 2}
    trained = [
        train_on(
            pools[num_ranks],
            counting_network(kind),
            samples(31, DOUBLE),
            validation=samples(9, DOUBLE, seed=1),
            **settings,
        )
        for kind in (dtype, torch.int64)
    ]
    ours, expected = (result.model.state_dict() for result in trained)
    assert ours["0.seen"].dtype == ours["places"].dtype == dtype
    assert ours["0.seen"][0].abs() > 0
    for name, value in expected.items():
        assert torch.equal(ours[name], value.to(ours[name].dtype)), name
    assert trained[0].history.loss == trained[1].history.loss
