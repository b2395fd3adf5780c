"""replace_head on the networks of torchvision and others; weights from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

import gpupool
from gpupool import DataError, TrainingError, replace_head
from tests.servers.s3 import SeaweedServer
from tests.support.raising import raises

CLASSIFIERS = torchvision.models.list_models(module=torchvision.models)
SEGMENTATION = torchvision.models.list_models(module=torchvision.models.segmentation)
# The smallest of each family.
FAMILIES = [
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "googlenet",
    "inception_v3",
    "maxvit_t",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "resnet18",
    "resnext50_32x4d",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    "swin_t",
    "swin_v2_t",
    "vgg11",
    "vit_b_32",
    "wide_resnet50_2",
]
# Regnets compute their sizes with tensors, so they cannot be built without memory.
REGNETS = [name for name in CLASSIFIERS if name.startswith("regnet")]
SMALL = ["mobilenet_v3_small", "regnet_x_400mf", "regnet_y_400mf", "resnet18", "squeezenet1_1"]


def built(name: str, **settings: Any) -> nn.Module:
    return torchvision.models.get_model(name, weights=None, **settings)


def changed_shapes(before: nn.Module, after: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters that are others."""
    old = dict(before.named_parameters())
    assert list(old) == [name for name, _ in after.named_parameters()]
    return {n: tuple(p.shape) for n, p in after.named_parameters() if p.shape != old[n].shape}


def without_values(name: str, **settings: Any) -> nn.Module:
    """A network that takes no memory, and no time to initialize."""
    more = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    with torch.device("meta"):
        return built(name, **more, **settings)


@pytest.mark.parametrize(
    "name",
    [
        name if name in FAMILIES else pytest.param(name, marks=pytest.mark.long)
        for name in CLASSIFIERS
        if name not in REGNETS
    ],
)
def test_of_every_classifier_the_last_layer_is_another(name: str) -> None:
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


@pytest.mark.parametrize("name", SMALL)
def test_the_network_has_as_many_outputs_as_classes(name: str) -> None:
    changed = replace_head(built(name), 7).eval()
    with torch.no_grad():
        assert changed(torch.zeros(1, 3, 32, 32)).shape == (1, 7)


@pytest.mark.parametrize(("name", "num_outputs"), [("googlenet", 3), ("inception_v3", 2)])
def test_auxiliary_classifiers_follow(name: str, num_outputs: int) -> None:
    changed = replace_head(without_values(name), 7).train()
    with torch.no_grad(), torch.device("meta"):
        outputs = changed(torch.zeros(2, 3, 299, 299))
    assert [tuple(output.shape) for output in outputs] == [(2, 7)] * num_outputs


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
    assert torch.equal(changed.get_parameter("conv1.weight"), model.conv1.weight)


def test_a_network_that_is_one_layer_is_replaced_whole() -> None:
    assert replace_head(nn.Linear(4, 2), 7).out_features == 7  # type: ignore[union-attr]


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
    with raises(TrainingError, "Sequential ", "nn.Linear(..., 7)"):
        replace_head(nn.Sequential(nn.ReLU()), 7)
    with raises(TrainingError, "model is a type", "torch.nn.Module"):
        replace_head(nn.Linear, 7)  # type: ignore[arg-type]
    with raises(TrainingError, "num_classes"):
        replace_head(nn.Linear(2, 2), 0)


# ---- weights from files ------------------------------------------------------------------------


def small(num_classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, num_classes))


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"model": state, "epoch": 3},
        lambda state: {"state_dict": {f"_orig_mod.{n}": v for n, v in state.items()}},
    ],
    ids=["plain", "in a checkpoint", "compiled, in a checkpoint"],
)
def test_weights_come_from_a_file_as_others_write_it(tmp_path: Path, wrap: Any) -> None:
    model, given = small(), small()
    torch.save(wrap(model.state_dict()), tmp_path / "weights.pth")
    loaded = gpupool.load_weights(given, tmp_path / "weights.pth")
    assert same(loaded, model)
    assert not same(given, model)


def test_weights_come_from_a_bucket_and_as_safetensors(s3: SeaweedServer, tmp_path: Path) -> None:
    from safetensors.torch import save

    model, url = small(), s3.make_bucket("weights")
    import fsspec

    with fsspec.open(f"{url}/w.safetensors", "wb", **s3.storage_options) as file:
        file.write(save(model.state_dict()))
    found = gpupool.load_weights(
        small(), f"{url}/w.safetensors", storage_options=s3.storage_options
    )
    assert same(found, model)


def test_weights_of_another_network_are_named(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save(small(1000).state_dict(), path)
    with raises(DataError, "2.weight", "[1000, 5]", "[3, 5]", kind="other network"):
        gpupool.load_weights(small(), path)
    torch.save(nn.Linear(4, 5).state_dict(), path)
    with raises(DataError, "0.weight", '"weight"', kind="other network"):
        gpupool.load_weights(small(), path)


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_weights_that_are_no_tensors_of_their_kind_are_named(tmp_path: Path) -> None:
    model, path = nn.BatchNorm1d(4), tmp_path / "w.pth"
    for odd in (torch.zeros(2), "text", torch.zeros(()).to_sparse()):
        torch.save({**model.state_dict(), "num_batches_tracked": odd}, path)
        with raises(DataError, "num_batches_tracked", kind="other network"):
            gpupool.load_weights(model, path)
    (tmp_path / "w.safetensors").write_bytes(b"\xff" * 100)
    with raises(DataError, "w.safetensors ", kind="no weights"):
        gpupool.load_weights(model, tmp_path / "w.safetensors")


class Anything:
    """A class whose pickles cannot be read without running code."""


@pytest.mark.parametrize(
    ("content", "kind"), [(Anything(), "not safe"), ([1, 2], "no weights"), (None, "missing")]
)
def test_a_file_without_weights_is_named(tmp_path: Path, content: Any, kind: str) -> None:
    if content is not None:
        torch.save(content, tmp_path / "w.pth")
    with raises(DataError, "w.pth", kind=kind):
        gpupool.load_weights(small(), tmp_path / "w.pth")
