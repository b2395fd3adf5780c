"""The samples with the highest losses: found on ranks, said in text, shown in a notebook."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from gpupool import OptionsError, Pool, SpmdError, TrainingError
from gpupool.notebook.worst_view import worst_html
from gpupool.training.worst import worst_samples
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


class Bright(nn.Module):
    """Takes bright images for the first class."""

    def forward(self, images: Tensor) -> Tensor:
        bright = images.mean((1, 2, 3))
        return torch.stack([bright, -bright], 1)


def pixels(png: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(png)))


@pytest.mark.parametrize("num", [1, 5, 40])
def test_they_are_those_of_one_process_on_any_number_of_ranks(pools: Pools, num: int) -> None:
    losses = functional.cross_entropy(SCORES, LABELS, reduction="none")
    order = losses.argsort(descending=True)[:num]
    whole = Named(torch.arange(NUM).double(), LABELS)
    for data in (whole, ConcatDataset([Subset(whole, range(9)), Subset(whole, range(9, NUM))])):
        for pool in pools.values():
            worst = worst_samples(Table(SCORES), data, num, batch_size=8, pool=pool)
            assert worst.indices == order.tolist()
            assert worst.losses == pytest.approx(losses[order].tolist())
            assert worst.true == [Named.classes[n] for n in LABELS[order].tolist()]
            names = [*Named.classes, 3]
            assert worst.found == [names[n] for n in SCORES[order].argmax(1).tolist()]
            assert len(worst) == min(num, NUM)
            assert worst[0].png == b""
    if num == 5:
        assert f"{worst[0].loss:.4g}" in repr(worst).splitlines()[2]
        assert len(repr(worst).splitlines()) == 2 + num
        html = worst_html(worst)
        assert html.count("<tr>") == 1 + num
        assert "<b>fox" not in html


@pytest.mark.long
def test_a_validation_shows_pictures_of_its_worst(pools: Pools) -> None:
    result = train_on(
        pools[2], nn.Sequential(nn.Flatten(), nn.Linear(200, 2)), IMAGES, epochs=1,
        validation=IMAGES, batch_size=7,
    )  # fmt: skip
    worst = result.worst(4)
    with torch.no_grad():
        inputs = (torch.stack([IMAGES[i][0] for i in range(21)]) / 255 - 0.5) / 0.25
        targets = torch.tensor([i % 2 for i in range(21)])
        losses = functional.cross_entropy(result.model(inputs), targets, reduction="none")
    assert worst.indices == losses.argsort(descending=True)[:4].tolist()
    assert worst.true == [Images.classes[index % 2] for index in worst.indices]
    for sample in worst:
        # as the files are, not as the network gets them; never enlarged
        assert pixels(sample.png).shape == (20, 10)
        assert np.abs(pixels(sample.png).astype(int) - 8 * sample.index).max() <= 1
    html = worst_html(worst)
    assert html.count("<img") == 4
    assert "<i>even" not in html
    assert len(html) < 20_000
    others = result.worst(2, dataset=Subset(IMAGES, [3, 4, 5]), pool=pools[1])
    assert set(others.indices) <= {0, 1, 2}


class Photos(Dataset[Any]):
    """As torchvision's ImageFolder: files, and a transform that normalizes itself."""

    class Compose:
        def __init__(self, *transforms: Any) -> None:
            self.transforms = list(transforms)

    class Normalize:
        mean, std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)

    classes = ["a", "b"]
    samples = [(f"/data/{'ab'[i % 2]}/{i}.jpg", i % 2) for i in range(6)]
    transform = Compose(None, Normalize())

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return (torch.full((3, 300, 150), index / 8) - 0.5) / 0.25, index % 2


def test_files_have_names_and_a_normalization_of_their_own_is_undone(pool2: Pool) -> None:
    worst = worst_samples(Bright(), Subset(Photos(), [5, 4, 3]), 2, workers=0)
    assert worst.indices == [0, 1]
    assert worst.files == ("/data/b/5.jpg", "/data/a/4.jpg")
    first = pixels(worst[0].png)
    assert first.shape == (128, 64, 3)
    assert worst[0].size == (150, 300)
    assert abs(int(first.mean()) - 255 * 5 / 8) <= 1
    assert "5.jpg" in worst_html(worst)
    assert "/data/b/5.jpg" in repr(worst)


def test_numbers_say_what_they_are(pool2: Pool) -> None:
    values = torch.tensor([[1.0], [2.0], [30.0]])
    data = TensorDataset(torch.arange(3).double(), torch.tensor([1.0, 2.5, 3.0]))
    worst = worst_samples(Table(values), data, 2, "mse")
    assert (worst.indices, worst.losses) == ([2, 1], [729.0, 0.25])
    assert (worst.found, worst.true) == ([30.0, 2.0], [3.0, 2.5])

    logits = torch.tensor([[3.0], [-3.0]])
    data = TensorDataset(torch.arange(2).double(), torch.tensor([1.0, 1.0]))
    worst = worst_samples(Table(logits), data, 1, "bce_with_logits")
    assert (worst.indices, worst.found, worst.true) == ([1], [0], [1])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield torch.zeros(8), 0


def test_what_has_no_worst_samples_is_refused(pool2: Pool) -> None:
    data = samples(20)
    result = train_on(pool2, network(), data, epochs=1)
    with raises(TrainingError):
        result.worst()
    for num in (0, 201, True, 1.5):
        with raises(OptionsError, "num"):
            result.worst(num, data)  # type: ignore[arg-type]
    with raises(TrainingError):
        result.worst(2, Stream())
    with raises(OptionsError, "epochs"):
        result.worst(2, data, epochs=3)
    with raises(TrainingError, "loss"):
        result.worst(2, data, loss="output")
    with raises(SpmdError, "loss", ename="TrainingError"):
        worst_samples(nn.Flatten(0), TensorDataset(torch.ones(3, 2), torch.ones(3)), 2, "mse")
    together = train_on(pool2, network(), data, epochs=1, gather=True)
    with raises(TrainingError, "loss"):
        together.worst(2, data)
    assert len(together.worst(2, data, loss="cross_entropy")) == 2
