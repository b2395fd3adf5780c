"""predict takes what a user has, and gives outputs for every sample once, in order."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset
from torchvision.transforms import v2

import gpupool
from gpupool import (
    ImageDatastore,
    OptionsError,
    SpmdError,
    TrainingError,
    TrainingOptions,
    TrainingRun,
)
from gpupool.core.network import NetworkInfo, give
from tests.engine.training.vectors import Table
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on, weights

NAMES = ["cat", "dog"]
SIDE = 8


@pytest.mark.long
def test_data_without_targets_give_the_same_outputs_on_any_ranks(pools: Pools) -> None:
    model, data = network(torch.float64), samples(11, torch.float64)
    rows = data.tensors[0]
    with torch.no_grad():
        expected = model(rows)
    for pool in pools.values():
        given: Any
        for given in (
            data,
            rows,
            rows.numpy(),
            rows.numpy().astype(np.float32).astype(np.float64),
            rows.tolist(),
            list(rows),
            TensorDataset(rows),
            [{"input": row} for row in rows],
            (row for row in rows),
            (rows, torch.zeros(11)),
        ):
            found = gpupool.predict(model, given, batch_size=4, pool=pool)
            tolerance = 1e-6 if isinstance(given, np.ndarray) else 1e-12
            assert torch.allclose(found, expected, atol=tolerance), type(given)


class Mean(nn.Module):
    """The mean of each channel: shows what an image has become on its way."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.shape[2:] != (SIDE, SIDE):
            raise ValueError(f"pictures of {tuple(images.shape)}")
        return images.mean((2, 3))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three pictures of different sizes, each of one colour, below one folder."""
    folder = tmp_path / "new"
    folder.mkdir()
    for number, size in enumerate([(SIDE, SIDE), (20, 12), (9, 30)]):
        Image.new("RGB", size, (60 * number, 200, 10)).save(folder / f"{number}.png")
    return folder


def test_pictures_of_any_kind_are_decoded_sized_and_normalized_as_in_training(
    pools: Pools, pictures: Path
) -> None:
    model = Mean()
    model.gpupool = NetworkInfo((), ((0.5,), (0.25,)), (3, SIDE, SIDE))  # type: ignore[assignment]
    files = sorted(pictures.iterdir())
    images = [Image.open(file) for file in files]
    colours = torch.tensor([[60.0 * number, 200, 10] for number in range(3)])
    expected = (colours / 255 - 0.5) / 0.25
    given: Any
    for given in (
        str(pictures),
        pictures,
        files,
        [str(file) for file in files],
        images,
        [np.asarray(image) for image in images],
        [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images],
        ImageDatastore(str(pictures), labels=None),
    ):
        outputs = gpupool.predict(model, given, pool=pools[2])
        assert torch.allclose(outputs, expected, atol=1e-5)
    for one in (str(files[1]), images[1], np.asarray(images[1])):
        assert torch.allclose(gpupool.predict(model, one, pool=pools[2]), expected[1:2], atol=1e-5)
    exact = np.stack([np.asarray(images[0])] * 3)
    outputs = gpupool.predict(model, exact, pool=pools[2])
    assert torch.allclose(outputs, expected[:1].expand(3, 3), atol=1e-5)


def test_names_of_classes_are_given_with_their_scores(pools: Pools, pictures: Path) -> None:
    model = nn.Sequential(Mean(), nn.Linear(3, 2))
    model.gpupool = NetworkInfo(("cat", "dog"), None, (3, SIDE, SIDE))  # type: ignore[assignment]
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[-1.0, 0, 0], [1, 0, 0]]))
        model[1].bias.copy_(torch.tensor([0.2, -0.2]))
    found = gpupool.predict(model, str(pictures), names=True, pool=pools[2])
    assert found == ["cat", "dog", "dog"]
    assert found.classes == ("cat", "dog")
    assert torch.equal(found.scores, gpupool.predict(model, str(pictures), pool=pools[2]))
    with raises(TrainingError, "names"):
        gpupool.predict(network(), samples(3), names=True, pool=pools[1])
    wide = nn.Sequential(nn.Identity())
    wide.gpupool = NetworkInfo(("cat", "dog"))  # type: ignore[assignment]
    with raises(TrainingError, "names"):
        gpupool.predict(wide, torch.zeros(3, 2, 4), names=True, pool=pools[1])


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(4):
            size = (SIDE + 3 * number, SIDE + 2)
            pixels = np.random.default_rng(number).integers(0, 255, (*size, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


def flat() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 2))


def test_a_result_predicts_pictures_as_it_has_validated_them(pools: Pools, photos: Path) -> None:
    plain = ImageDatastore(str(photos)).with_normalization(0.5, 0.25)
    sized = plain.with_transform(v2.Compose([v2.Resize(10), v2.CenterCrop(SIDE)]))
    drawn = plain.with_transform(v2.RandomResizedCrop(SIDE))
    files = [path for name in NAMES for path in sorted((photos / name).iterdir())]
    options = TrainingOptions(epochs=1, batch_size=4)
    run = TrainingRun(pools[2], flat(), drawn, "cross_entropy", options, sized)
    expected = gpupool.predict(run.result().model, sized, pool=pools[2])
    result = run.result()  # another one, as nobody has the first
    assert torch.equal(result.predict(files, pool=pools[2]), expected)
    names = result.predict(files, names=True, pool=pools[2])
    assert names == [NAMES[index] for index in expected.argmax(1)]
    assert result.predict(files[0], pool=pools[2]).shape == (1, 2)
    # Without a validation pictures get the size of the training's.
    result = train_on(pools[2], flat(), drawn, epochs=1, batch_size=4)
    exact = plain.with_transform(v2.Resize((SIDE, SIDE)))
    expected = gpupool.predict(result.model, exact, pool=pools[2])
    assert torch.equal(result.predict(files, pool=pools[2]), expected)
    assert torch.equal(gpupool.predict(result.model, files, pool=pools[2]), expected)


def test_one_folder_that_is_no_class_is_new_data(pools: Pools, photos: Path) -> None:
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    model.gpupool = NetworkInfo(("cat", "dog"))  # type: ignore[assignment]
    shutil.copytree(photos / "cat", photos / "new" / "unknown")
    sized = v2.Resize((SIDE, SIDE))
    new = ImageDatastore(str(photos / "new")).with_transform(sized)
    assert gpupool.predict(model, new, pool=pools[1]).shape == (4, 2)


def test_what_a_module_does_not_keep_is_sent_beside_it(pools: Pools) -> None:
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Flatten()))
    give(model, NetworkInfo((), ((0.5,), (0.25,)), (1, 2, 2)))
    found = gpupool.predict(model, torch.ones(3, 1, 2, 2), pool=pools[2])
    assert torch.equal(found, torch.full((3, 4), 2.0))


def test_a_pair_of_arrays_is_trained_on_as_a_tensor_dataset(pools: Pools) -> None:
    data = samples(30)
    inputs, targets = (tensor.numpy() for tensor in data.tensors)
    pair = (inputs.astype(np.float64), targets.astype(np.int32))
    for size in (1, 3):
        expected = train_on(pools[size], network(), data, epochs=2, validation=data)
        for given in (pair, data.tensors):
            result = train_on(pools[size], network(), given, epochs=2, validation=given)
            assert torch.equal(weights(result.model), weights(expected.model))
            assert result.best == expected.best or result.best is not None
    accuracy = gpupool.evaluate(expected.model, data, pool=pools[1])
    assert gpupool.evaluate(expected.model, pair, pool=pools[1]) == accuracy
    with raises(TrainingError, " 30 ", " 29 "):
        train_on(pools[1], network(), (inputs, targets[:-1]))


# ---- outputs: every sample once, in order --------------------------------------------------------


@pytest.mark.parametrize("num", [1, 7, 101])
def test_outputs_come_in_the_order_of_the_samples_in_what_the_network_gives(
    pools: Pools, num: int
) -> None:
    rows = {"a": torch.randn(num, 2), "b": torch.randn(num, 3, 4)}
    data = TensorDataset(torch.arange(num).double(), torch.zeros(num))
    for pool in pools.values():
        found = gpupool.predict(Table(rows), data, batch_size=3, pool=pool)
        assert found.keys() == rows.keys()
        assert all(torch.equal(found[name], rows[name]) for name in rows)


def test_less_precision_is_asked_for_and_seen(pools: Pools) -> None:
    data, model = samples(40), network()
    with torch.no_grad():
        exact = model(data.tensors[0])
    outputs = gpupool.predict(model, data, precision="bf16", pool=pools[2])
    assert outputs.dtype == torch.float32
    assert 1e-5 < (outputs - exact).abs().max() < 0.05
    with raises(OptionsError, "precision"):
        gpupool.predict(model, data, precision="half", pool=pools[2])


def test_bad_input_is_refused(pools: Pools, photos: Path) -> None:
    with raises(TrainingError, "model"):
        gpupool.predict("resnet18", samples(4), pool=pools[2])  # type: ignore[arg-type]
    for empty in ([], {"train": torch.ones(3, 8)}):
        with raises(TrainingError, "dataset"):
            gpupool.predict(network(), empty, pool=pools[2])
    for given in ("s3://photos/train", ImageDatastore(str(photos), labels=None)):
        with raises(TrainingError, "dataset"):
            train_on(pools[1], network(), given)


class TimeFirst(nn.Module):
    """Gives (time, samples, ...)."""

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": inputs.transpose(0, 1)}


def test_outputs_whose_rows_are_no_samples_are_refused(pools: Pools) -> None:
    for pool in pools.values():
        with raises(SpmdError, "(7, ", ename="TrainingError"):
            gpupool.predict(TimeFirst(), torch.randn(12, 7, 4), batch_size=12, pool=pool)
