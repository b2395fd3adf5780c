"""Networks that give their loss, and want the targets of a pair for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpupool import OptionsError, TrainingOptions
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import samples, train_on, weights

DOUBLE = torch.float64


class Scored(nn.Module):
    """Gives (scores, loss), and without targets no loss, as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 3, dtype=DOUBLE)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Any:
        scores = self.head(inputs)
        return scores, None if targets is None else functional.cross_entropy(scores, targets)


class Lost(Scored):
    """Gives its loss alone, of two arguments that it must have, whatever they are called."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(x), y)


class TwoInputs(Scored):
    """Of a pair it wants the inputs alone, and these are two."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.head(torch.cat([first, second], 1)).square().mean()


@pytest.mark.parametrize("make", [Scored, Lost])
def test_a_network_of_inputs_and_targets_gives_its_loss_on_any_ranks(
    pools: Pools, make: type[Scored]
) -> None:
    settings: dict[str, Any] = {"batch_size": 8, "epochs": 2, "lr": 0.1, "loss": "output"}
    data = samples(21, DOUBLE)
    plain = train_on(pools[1], Scored().head, data, **settings | {"loss": "cross_entropy"})
    for pool in pools.values():
        found = train_on(pool, make(), data, **settings)
        assert (weights(found.model) - weights(plain.model)).abs().max() < 1e-12
        assert found.history.loss == pytest.approx(plain.history.loss, abs=1e-12)


def test_two_inputs_stay_two_inputs(pools: Pools) -> None:
    x = torch.randn(16, 8, dtype=DOUBLE)
    pairs = [((row[:4], row[4:]), 0) for row in x]
    found = train_on(pools[1], TwoInputs(), pairs, loss="output", epochs=1, batch_size=16)
    expected = Scored().head(x).square().mean().item()
    assert found.history.loss == pytest.approx([expected], abs=1e-12)


def test_a_column_by_its_name_goes_into_a_tuple() -> None:
    with raises(OptionsError, "inputs", "inputs=('pixels',)"):
        TrainingOptions(inputs="pixels")
    assert TrainingOptions(inputs=("pixels",)).inputs == ("pixels",)
