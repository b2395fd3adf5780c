"""What a network takes for what, and its worst samples: found by ranks, told in text, drawn."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import gpupool
from gpupool import ConfusionMatrix, Pool, TrainingError
from gpupool.notebook import formatters
from gpupool.notebook.objects import preview_html
from gpupool.training.inference import worst_samples
from tests.engine.training.vectors import Stream, Table, Targets
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import Images, network, samples, train_on

NUM, CLASSES = 31, 4
SCORES = torch.randn(NUM, CLASSES, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 3, (NUM,), generator=torch.Generator().manual_seed(1))


def counted(predicted: Any, actual: Any, num: int) -> list[list[int]]:
    counts = np.zeros((num, num), np.int64)
    np.add.at(counts, (np.asarray(actual), np.asarray(predicted)), 1)
    return counts.tolist()


class Named(TensorDataset):
    classes = ["cat", "dog", "<b>fox"]


@pytest.mark.parametrize("num", [NUM, 1])
def test_counts_are_those_of_one_process(pools: Pools, num: int) -> None:
    data = Named(torch.arange(num).double(), LABELS[:num])
    part = ConcatDataset([Subset(data, range(num // 2)), Subset(data, range(num // 2, num))])
    for pool in pools.values():
        matrix = gpupool.confusion(Table(SCORES), part, batch_size=8, pool=pool)
        assert matrix.counts.dtype == np.int64
        assert matrix.counts.tolist() == counted(SCORES[:num].argmax(1), LABELS[:num], CLASSES)
        assert matrix.classes == ("cat", "dog", "<b>fox", "3")


def test_pixels_are_counted_where_they_have_a_class(pools: Pools) -> None:
    maps = torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(2))
    masks = torch.tensor([0, 1, 2, -100]).view(1, 2, 2).repeat(5, 1, 1)
    data, model = TensorDataset(torch.arange(5).double(), masks), Table({"out": maps, "aux": maps})
    matrix, known = gpupool.confusion(model, data, pool=pools[3]), masks != -100
    assert matrix.counts.tolist() == counted(maps.argmax(1)[known], masks[known], 3)
    assert matrix.num_samples == 15


def test_one_output_tells_two_classes_apart(pools: Pools) -> None:
    data = TensorDataset(torch.arange(4).double(), torch.tensor([0, 1, 1, 0]))
    logits = torch.tensor([[-1.0], [2.0], [-3.0], [4.0]])
    matrix = gpupool.confusion(Table(logits), data, classes=["no", "yes"], pool=pools[1])
    assert matrix.counts.tolist() == [[1, 1], [1, 1]]
    with raises(TrainingError, "classes", " 3 ", " 2 "):
        gpupool.confusion(Table(logits), data, classes=["no", "yes", "?"], pool=pools[1])
    with raises(gpupool.SpmdError, "metrics", ename="TrainingError"):
        gpupool.confusion(Table(SCORES), Targets(kind=LABELS), pool=pools[1])


@pytest.fixture
def matrix() -> ConfusionMatrix:
    counts = np.array([[8, 2, 0], [1, 3, 0], [0, 0, 0]])
    return ConfusionMatrix(counts, ("cat", "<b>", "a very long name"))


def test_shares_of_rows_and_columns(matrix: ConfusionMatrix) -> None:
    assert matrix.accuracy == 11 / 14
    assert matrix.recall[:2].tolist() == [0.8, 0.75]
    assert matrix.precision[:2].tolist() == [8 / 9, 0.6]
    assert math.isnan(matrix.recall[2])
    assert matrix.shares[0].tolist() == [0.8, 0.2, 0.0]
    assert matrix.most_confused() == [("cat", "<b>", 2), ("<b>", "cat", 1)]


def test_it_is_a_table_with_colours_in_a_notebook(matrix: ConfusionMatrix) -> None:
    shell = InteractiveShell()
    formatters.register(shell)
    bundle, _ = shell.display_formatter.format(matrix)  # type: ignore[union-attr]
    html = bundle["text/html"]
    assert "<b>" not in html.replace("<b>Confusion matrix</b>", "")
    assert html.count("<tr") == 1 + 3 + 1
    assert ">recall<" in html
    assert ">precision<" in html
    assert "rgba(0,114,189,0.52)" in html  # 80 % of its row
    assert ">80.0 %<" in html
    assert bundle["text/plain"] == repr(matrix)


# ---- the samples with the highest losses --------------------------------------------------------

IMAGES = Images(8, (1, 20, 10))


def test_the_worst_are_those_of_one_process_on_any_number_of_ranks(pools: Pools) -> None:
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


# Normalized by their own transform.
STRIPES = torch.linspace(-2, 2, 300)[None, :, None].expand(3, 300, 150)
PHOTOS = [(STRIPES + index, index / 5) for index in range(6)]


def test_numbers_are_shown_beside_pictures_whose_normalization_nobody_knows(pool2: Pool) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 300 * 150, 1))
    nn.init.zeros_(model[1].weight), nn.init.zeros_(model[1].bias)
    worst = worst_samples(model, PHOTOS, 2, nn.MSELoss(), workers=0)
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
