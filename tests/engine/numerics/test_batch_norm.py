"""Batch norm over all ranks is batch norm of the whole batch, whatever the shares."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

from gpupool import TrainingError
from gpupool.engine.numerics.batch_norm import SyncBatchNorm, plain_batch_norm, sync_batch_norm
from tests.engine.numerics import norms
from tests.support.pools import Pools
from tests.support.raising import raises


def test_outputs_gradients_and_statistics_are_those_of_the_whole_batch(pools: Pools) -> None:
    found = pools[3].run(
        "from tests.engine.numerics.norms import *\n{kind: differences(kind) for kind in KINDS}"
    )
    for differences in dict(found).values():
        assert differences.keys() == norms.KINDS.keys()
        assert max(differences.values()) < 1e-12, differences


def test_large_means_do_not_cost_the_variance_nor_half_precision_the_sums() -> None:
    for kind, mean in ((torch.float32, 1e4), (torch.bfloat16, 100)):
        inputs = (torch.randn(64, 3) + mean).to(kind)
        outputs = sync_batch_norm(nn.BatchNorm1d(3))(inputs)
        exact = torch.nn.functional.batch_norm(inputs.double(), None, None, training=True)
        assert outputs.dtype == kind
        assert (outputs - exact).abs().max() < 0.02


def test_a_synchronised_norm_has_the_same_state_and_becomes_what_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    norm, keys = model[1], list(model.state_dict())
    assert sync_batch_norm(model) is model
    assert isinstance(model[1], SyncBatchNorm)
    assert model[1] is norm
    assert list(model.state_dict()) == keys
    assert isinstance(copy.deepcopy(model)[1], SyncBatchNorm)
    assert isinstance(pickle.loads(pickle.dumps(model))[1], SyncBatchNorm)
    assert type(plain_batch_norm(model)[1]) is nn.BatchNorm2d
    assert model[1] is norm


def test_a_norm_with_a_forward_of_its_own_is_refused_by_name() -> None:
    class Activated(nn.BatchNorm2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).relu()

    with raises(TrainingError, "0", " Activated "):
        sync_batch_norm(nn.Sequential(Activated(3)))
