"""Segmentation with DeepLabV3, of photographs in files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large
from torchvision.transforms import v2

import gpupool
from demo import photos
from gpupool import SegmentationDatastore, replace_head
from tests.support.pools import Pools
from tests.support.trainings import train_on

pytestmark = pytest.mark.long


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
        metrics="mean_iou",
        objective="mean_iou",
        checkpoint=str(tmp_path / "run"),
    )
    history = result.history
    half = len(history.loss) // 2
    assert sum(history.loss[half:]) < sum(history.loss[:half])
    values = [event.metrics["mean_iou"] for event in history.validations]
    assert len(values) == 4
    again = gpupool.evaluate(result.model, validation, ["mean_iou"], pool=pools[1])
    assert again["mean_iou"] == pytest.approx(max(values), abs=1e-3)
    assert list((tmp_path / "run").iterdir())
    outputs: dict[str, Tensor] = gpupool.predict(result.model, validation, pool=pools[2])
    assert {name: tuple(t.shape) for name, t in outputs.items()} == {
        "out": (2, 2, 84, 84),
        "aux": (2, 2, 84, 84),
    }
