"""Training on random patches: the same on any number of ranks, each of which reads a pair once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import v2

import gpupool
from gpupool import Pool, SegmentationDatastore
from tests.support.pools import Pools
from tests.support.trainings import train_on, weights

NUM_PAIRS = 8


def make_streets(tmp_path: Path) -> SegmentationDatastore:
    generator = np.random.default_rng(0)
    for kind in ("images", "masks"):
        (tmp_path / kind).mkdir()
    for number in range(NUM_PAIRS):
        image = generator.integers(0, 256, (40, 50, 3), np.uint8)
        mask = (image[..., 0] > 127).astype(np.uint8)
        Image.fromarray(image).save(tmp_path / "images" / f"{number}.png")
        Image.fromarray(mask).save(tmp_path / "masks" / f"{number}.png")
    classes = {"dark": 0, "bright": 1}
    return SegmentationDatastore(
        str(tmp_path / "images"), str(tmp_path / "masks"), classes=classes
    ).with_normalization(0.5, 0.5)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1))


class WithAuxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"out": self.inner(images), "aux": images}


def num_reads(pool: Pool) -> int:
    def of_this_rank() -> int:
        from gpupool.data.stores.retry import counts

        return counts.snapshot().reads

    return sum(dict(pool.run(of_this_rank)).values())


def test_ranks_together_train_as_one_and_each_reads_a_pair_once(
    pools: Pools, tmp_path: Path
) -> None:
    streets = make_streets(tmp_path)
    flipped = streets.with_transform(v2.RandomHorizontalFlip(0.5))
    patches = flipped.random_patches(16, per_image=6, open_pairs=4)
    settings = {"validation": streets, "batch_size": 8, "epochs": 2, "lr": 0.5}
    settings |= {"metrics": "mean_iou", "objective": "mean_iou"}
    results, reads = [], []
    for ranks in (1, 2):
        before = num_reads(pools[ranks])
        results.append(train_on(pools[ranks], WithAuxiliary(), patches, **settings))
        reads.append(num_reads(pools[ranks]) - before)
    first, second = (result.history for result in results)
    assert len(first.loss) == 2 * NUM_PAIRS * 6 // 8
    assert first.loss == pytest.approx(second.loss, abs=1e-5)
    validated = [[event.loss for event in one.validations] for one in (first, second)]
    assert validated[0] == pytest.approx(validated[1], abs=1e-5)
    assert (weights(results[0].model) - weights(results[1].model)).abs().max() < 1e-4
    assert first.loss[-1] < first.loss[0]
    files, num_validations = 2 * NUM_PAIRS, len(first.validations)
    assert reads[0] == files * (1 + num_validations)  # so few stay open from epoch to epoch
    assert reads[0] <= reads[1] <= files * (2 + num_validations)
    best = max(event.metrics["mean_iou"] for event in first.validations)
    measured = gpupool.evaluate(results[0].model, streets, ["mean_iou"], pool=pools[2])
    assert measured["mean_iou"] == pytest.approx(best, abs=1e-6)
    outputs = gpupool.predict(results[0].model, streets, pool=pools[2])
    assert (outputs["out"].shape, outputs["aux"].shape) == ((8, 2, 40, 50), (8, 3, 40, 50))
