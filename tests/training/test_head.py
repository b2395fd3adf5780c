"""replace_head on the networks of torchvision and others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from gpupool import TrainingError, replace_head
from tests.support.raising import raises

SEGMENTATION = torchvision.models.list_models(module=torchvision.models.segmentation)
# The smallest of each family. Regnets compute their sizes with tensors: not without memory.
FAMILIES = [
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s",
    "googlenet", "inception_v3", "maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small",
    "resnet18", "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t", "swin_v2_t",
    "vgg11", "vit_b_32", "wide_resnet50_2",
]  # fmt: skip


def changed_shapes(before: nn.Module, after: nn.Module) -> dict[str, tuple[int, ...]]:
    old = dict(before.named_parameters())
    assert list(old) == [name for name, _ in after.named_parameters()]
    return {n: tuple(p.shape) for n, p in after.named_parameters() if p.shape != old[n].shape}


def without_values(name: str, **settings: Any) -> nn.Module:
    """A network that takes no memory, and no time to initialize."""
    more = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    with torch.device("meta"):
        return torchvision.models.get_model(name, weights=None, **more, **settings)


@pytest.mark.parametrize("name", FAMILIES)
def test_of_a_classifier_of_each_family_the_last_layer_is_another(name: str) -> None:
    model = without_values(name)
    changed = replace_head(model, 7)
    shapes = changed_shapes(model, changed)
    layers = {name.rpartition(".")[0] for name in shapes}
    expected = {"googlenet": {"aux1.fc2", "aux2.fc2", "fc"}, "inception_v3": {"AuxLogits.fc", "fc"}}
    assert layers == expected.get(name, {list(layers)[-1]})
    assert {shape[0] for shape in shapes.values()} == {7}
    side = 299 if name == "inception_v3" else 224
    with torch.no_grad(), torch.device("meta"):
        assert changed.eval()(torch.zeros(1, 3, side, side)).shape == (1, 7)


@pytest.mark.parametrize("name", SEGMENTATION)
def test_of_segmentation_networks_each_output_has_as_many_maps(name: str) -> None:
    has_aux = {} if name.startswith("lraspp") else {"aux_loss": True}
    model = without_values(name, weights_backbone=None, num_classes=21, **has_aux)
    with torch.no_grad(), torch.device("meta"):
        outputs = replace_head(model, 5).eval()(torch.zeros(1, 3, 64, 64))
    assert {tuple(output.shape) for output in outputs.values()} == {(1, 5, 64, 64)}
    assert len(outputs) == (2 if has_aux else 1)


def test_the_other_weights_are_kept_and_the_given_network_is_left_alone() -> None:
    model = torchvision.models.resnet18()
    changed = replace_head(model, 7)
    assert model.fc.out_features == 1000
    assert replace_head(nn.Linear(4, 2), 7).out_features == 7  # type: ignore[union-attr]
    assert torch.equal(changed.get_parameter("conv1.weight"), model.conv1.weight)


def test_a_network_that_replaces_its_own_head_is_asked_to() -> None:
    class OfTimm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.after = nn.Linear(4, 2), nn.Linear(2, 2)

        def reset_classifier(self, num_classes: int) -> None:
            self.head = nn.Linear(4, num_classes)

    model = OfTimm()
    changed = replace_head(model, 7)
    assert (changed.head.out_features, model.head.out_features) == (7, 2)  # type: ignore[union-attr]


def test_a_network_without_a_layer_to_replace_is_refused() -> None:
    with raises(TrainingError, "Sequential "):
        replace_head(nn.Sequential(nn.ReLU()), 7)
    with raises(TrainingError, "model is a type", "torch.nn.Module"):
        replace_head(nn.Linear, 7)  # type: ignore[arg-type]
    with raises(TrainingError, "num_classes"):
        replace_head(nn.Linear(2, 2), 0)
