"""The samples with the highest losses: computed by ranks, said in text, shown in a notebook."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from gpupool import Pool, TrainingError
from gpupool.notebook.objects import preview_html
from gpupool.training.inference import worst_samples
from tests.engine.batches.streams import Stream
from tests.engine.metrics.tables import Table
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import Images, network, samples, train_on

NUM = 31
SCORES = torch.randn(NUM, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 3, (NUM,), generator=torch.Generator().manual_seed(1))
IMAGES = Images(8, (1, 20, 10))


class Named(TensorDataset):
    classes = ["cat", "dog", "<b>fox"]


def test_they_are_those_of_one_process_on_any_number_of_ranks(pools: Pools) -> None:
    losses = functional.cross_entropy(SCORES, LABELS, reduction="none")
    order = losses.argsort(descending=True)
    whole, names = Named(torch.arange(NUM).double(), LABELS), [*Named.classes, "3"]
    data = ConcatDataset([Subset(whole, range(9)), Subset(whole, range(9, NUM))])
    pairs = list(zip(SCORES.argmax(1)[order].tolist(), LABELS[order].tolist(), strict=True))
    for pool in pools.values():
        worst = worst_samples(Table(SCORES), data, 40, batch_size=8, pool=pool)  # more than any
        assert worst.indices == order.tolist()
        assert worst.losses == pytest.approx(losses[order].tolist())
        said = [one.label.splitlines()[:2] for one in worst]
        assert said == [[names[found], f"true: {names[true]}"] for found, true in pairs]
    assert f"loss {worst.losses[0]:.4g}" in repr(worst).splitlines()[1]
    assert len(repr(worst).splitlines()) == 1 + NUM
    assert "<b>fox" not in preview_html(worst)


@pytest.mark.long
def test_a_validation_shows_pictures_of_its_worst(pools: Pools) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(200, 2))
    result = train_on(pools[2], model, IMAGES, epochs=1, validation=IMAGES, batch_size=7)
    worst = result.worst(4)
    for index, sample in zip(worst.indices, worst, strict=True):
        assert f"true: {Images.classes[index % 2]}" in sample.label
        pixels = np.asarray(Image.open(io.BytesIO(sample.png)))
        assert np.array_equal(pixels, IMAGES[index][0][0])  # never enlarged
    html = preview_html(worst)
    assert html.count("<img") == 4
    assert "<i>even" not in html
    others = result.worst(2, dataset=Subset(IMAGES, [3, 4, 5]), pool=pools[1])
    assert set(others.indices) <= {0, 1, 2}


class Photos:
    """Normalized by their own transform."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        return torch.linspace(-2, 2, 300)[None, :, None].expand(3, 300, 150) + index, index / 5


def test_numbers_are_shown_beside_pictures_whose_normalization_nobody_knows(pool2: Pool) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 300 * 150, 1))
    nn.init.zeros_(model[1].weight), nn.init.zeros_(model[1].bias)
    worst = worst_samples(model, Photos(), 2, nn.MSELoss(), workers=0)
    assert [one.label.splitlines()[:2] for one in worst] == [["0", "true: 1"], ["0", "true: 0.8"]]
    pixels = np.asarray(Image.open(io.BytesIO(worst[0].png)))
    assert (pixels.shape, worst[0].width, worst[0].height) == ((128, 64, 3), 150, 300)
    assert pixels.min() < 5 < 250 < pixels.max()


def test_what_has_no_worst_samples_is_refused(pool2: Pool) -> None:
    data = samples(20)
    result = train_on(pool2, network(), data, epochs=1)
    with raises(TrainingError, "dataset"):
        result.worst()
    cases: list[Any] = [(Stream(5), None), (data, lambda outputs, targets: outputs.mean())]
    for dataset, loss in cases:
        with raises(TrainingError, "dataset", "loss"):
            result.worst(2, dataset, loss=loss)
