"""replace_head on the classifiers of torchvision."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

from gpupool import TrainingError, replace_head

FAMILIES = ["alexnet", "resnet18", "squeezenet1_1", "mobilenet_v3_small", "efficientnet_b0"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_network_has_as_many_outputs_as_classes(name: str) -> None:
    model = torchvision.models.get_model(name, weights=None)
    changed = replace_head(model, 7).eval()
    with torch.no_grad():
        assert changed(torch.zeros(1, 3, 64, 64)).shape == (1, 7)


def test_the_other_weights_are_kept_and_the_given_network_is_left_alone() -> None:
    model = torchvision.models.resnet18()
    changed = replace_head(model, 7)
    assert model.fc.out_features == 1000
    assert torch.equal(changed.get_parameter("conv1.weight"), model.conv1.weight)


def test_a_network_that_is_one_layer_is_replaced_whole() -> None:
    assert replace_head(nn.Linear(4, 2), 7).out_features == 7  # type: ignore[union-attr]


def test_a_network_without_a_layer_to_replace_is_refused() -> None:
    with pytest.raises(TrainingError, match="no linear or convolution layer"):
        replace_head(nn.Sequential(nn.ReLU()), 7)
    with pytest.raises(TrainingError, match="Call it"):
        replace_head(nn.Linear, 7)  # type: ignore[arg-type]
