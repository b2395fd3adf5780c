"""Classes are matched by name, whatever folders a data set has; or refused before anything runs."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import gpupool
from gpupool import ImageDatastore, OptionsError, SegmentationDatastore, SpmdError, TrainingError
from gpupool.core.network import NetworkInfo, info_of
from gpupool.core.options.datasets import bound, class_names
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import network, train_on

COLOURS = {
    "blue": (10, 20, 230),
    "green": (20, 230, 30),
    "red": (230, 30, 10),
    "grey": (99, 99, 99),
}
SIDE = 8


def folder(path: Path, names: list[str], num: int = 6) -> str:
    for name in names:
        (path / name).mkdir(parents=True, exist_ok=True)
        for number in range(num):
            shade = np.clip(np.array(COLOURS[name]) + number, 0, 255).astype(np.uint8)
            Image.fromarray(np.tile(shade, (SIDE, SIDE, 1))).save(path / name / f"{number}.png")
    return str(path)


class Nearest(nn.Module):
    """Knows the colours of its classes: what it gives is certain, without any training."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        colours = torch.tensor([COLOURS[name] for name in names]) / 255
        self.colours = nn.Parameter(colours)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        means = images.mean((2, 3))
        return -(means[:, None] - self.colours).square().sum(2) * 100


NAMES = ["blue", "green", "red"]


def knowing(names: list[str]) -> nn.Module:
    model = Nearest(names)
    model.gpupool = NetworkInfo(tuple(names))  # type: ignore[assignment]
    return model


@pytest.fixture
def train_set(tmp_path: Path) -> ImageDatastore:
    return ImageDatastore(folder(tmp_path / "train", NAMES))


@pytest.mark.parametrize("size", [1, 3])
def test_a_set_that_lacks_a_class_is_validated_and_evaluated_as_the_whole(
    pools: Pools, tmp_path: Path, train_set: ImageDatastore, size: int
) -> None:
    test = ImageDatastore(folder(tmp_path / "test", ["green", "red"]))
    assert test.classes != train_set.classes
    result = train_on(
        pools[size], Nearest(NAMES), train_set, validation=test, epochs=1, lr=1e-6, batch_size=6
    )
    assert result.best is not None
    assert result.best.accuracy == 1
    assert result.classes == tuple(NAMES)
    pool = pools[size]
    for found in (test, Subset(test, range(3, 9)), ConcatDataset([test, train_set])):
        assert gpupool.evaluate(result.model, found, pool=pool) == {"accuracy": 1}
        matrix = gpupool.confusion(result.model, found, pool=pool)
        assert (matrix.classes, matrix.accuracy) == (tuple(NAMES), 1)


def test_what_is_not_of_gpupool_is_matched_too(pools: Pools, tmp_path: Path) -> None:
    class Rows(Dataset[Any]):
        """As a data set of Hugging Face."""

        features = {"image": None, "label": type("ClassLabel", (), {"names": NAMES[:2]})}

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> dict[str, Any]:
            colour = torch.tensor(COLOURS[NAMES[index % 2]]) / 255
            return {"image": colour[:, None, None].expand(3, 2, 2), "label": index % 2}

    transform = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    images = ImageFolder(folder(tmp_path / "same", NAMES[:2]), transform)
    parts = random_split(images, [5, 7])
    for found in (images, parts[0], parts[1], Rows()):
        assert gpupool.evaluate(knowing(NAMES), found, pool=pools[2]) == {"accuracy": 1}
    other = ImageFolder(folder(tmp_path / "other", NAMES[1:]), transform)
    with raises(TrainingError, "(green, red)", "blue, green, red"):
        gpupool.evaluate(knowing(NAMES), other, pool=pools[2])
    assert class_names(TensorDataset(torch.zeros(3, 2), torch.zeros(3))) == ()


def test_other_classes_are_refused_and_named(pools: Pools, tmp_path: Path) -> None:
    train_set = ImageDatastore(folder(tmp_path / "train", NAMES))
    other = ImageDatastore(folder(tmp_path / "other", ["grey", "red"]))
    with raises(TrainingError, "grey"):
        train_on(pools[1], Nearest(NAMES), train_set, validation=other)
    # Parts of it without such an image are no fault.
    red = other.subset(other.labels == 1)
    assert gpupool.evaluate(knowing(NAMES), red, pool=pools[1]) == {"accuracy": 1}
    with raises(TrainingError, "grey"):
        train_on(pools[1], Nearest(NAMES), ConcatDataset([train_set, other]))
    with raises(TrainingError, "grey"):
        train_on(pools[1], knowing(NAMES), other)
    for ask in (gpupool.evaluate, gpupool.predict, gpupool.confusion):
        with raises(TrainingError, "grey"):
            ask(knowing(NAMES), other, pool=pools[1])
    # Without classes of the network, the positions count, as ever.
    assert gpupool.evaluate(Nearest(["grey", "red"]), other, pool=pools[1]) == {"accuracy": 1}
    with raises(OptionsError, "grey"):
        other.with_classes(NAMES)


def test_outputs_are_compared_with_the_classes_before_the_first_step(
    pools: Pools, train_set: ImageDatastore
) -> None:
    two, nine = Nearest(NAMES[:2]), TensorDataset(torch.randn(9, 8), torch.arange(9))
    with raises(SpmdError, "2 outputs", "3 classes", "replace_head(model, 3)"):
        train_on(pools[3], two, train_set, batch_size=2)
    with raises(SpmdError, "2 outputs", "3 classes"):
        gpupool.evaluate(two, train_set, pool=pools[3])
    with raises(SpmdError, "3 outputs", "9 classes"):  # without names the numbers count
        train_on(pools[3], network(), nine)
    wrong = TensorDataset(torch.randn(2, 8), torch.tensor([0, -1]))
    with raises(TrainingError, " -1", "-100"):
        train_on(pools[3], network(), wrong)
    ignored = TensorDataset(torch.randn(2, 8), torch.tensor([0, -100]))
    assert train_on(pools[3], network(), ignored, epochs=1).stopped_by == "epochs"


def test_masks_in_another_order_of_classes_are_refused(tmp_path: Path) -> None:
    for kind, mode in (("images", "RGB"), ("masks", "L")):
        (tmp_path / kind).mkdir()
        Image.new(mode, (4, 4)).save(tmp_path / kind / "1.png")
    urls = str(tmp_path / "images"), str(tmp_path / "masks")
    pairs = SegmentationDatastore(*urls, classes={"road": 7, "car": 0})
    who = "validation", "the training data do"
    patches = pairs.random_patches(2, 3)
    for names in (["road", "car"], ["road", "car", "tree"]):
        assert (bound(pairs, names, *who), bound(patches, names, *who)) == (pairs, patches)
    with raises(OptionsError, "['car', 'road']"):
        bound(pairs, ["car", "road"], *who)
    for names in (["car", "road"], ["road", "tree"]):
        with raises(TrainingError, "car"):
            bound(patches, names, *who)


def test_what_a_network_knows_comes_along(pools: Pools, tmp_path: Path) -> None:
    model, info = network(), NetworkInfo(("a", "b", "c"), ((0.5,), (0.25,)), (3, 8, 8))
    names = list(model.state_dict())
    model.gpupool = info  # type: ignore[assignment]
    assert list(model.state_dict()) == names
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert info_of(copied) == info
        assert copied.gpupool.classes == ("a", "b", "c")
    assert info_of(torch.compile(model)) == info
    assert info_of(nn.DataParallel(model)) == info
    # A network that is a part of another one says nothing about that one's outputs.
    wrapper = nn.Module()
    wrapper.module = model
    assert info_of(wrapper) == NetworkInfo()
    changed = gpupool.replace_head(model, 4)
    assert info_of(changed) == NetworkInfo((), info.normalization, info.input_shape)
    assert info_of(network()) == NetworkInfo()
    # Without gpupool, too.
    path = tmp_path / "info.pkl"
    path.write_bytes(pickle.dumps(info))
    code = (
        "import pickle, sys; sys.modules['gpupool'] = None; "
        f"print(pickle.load(open({str(path)!r}, 'rb')).classes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "('a', 'b', 'c')"


def test_normalization_of_the_network_holds_where_the_data_have_none(
    pools: Pools, train_set: ImageDatastore
) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 3))
    normalized = train_set.with_normalization((0.4, 0.5, 0.6), 0.2)
    result = train_on(pools[2], model, normalized, epochs=2, validation=train_set)
    assert result.normalization == ((0.4, 0.5, 0.6), (0.2, 0.2, 0.2))
    expected = gpupool.predict(result.model, normalized, pool=pools[2])
    with pytest.warns(UserWarning, match=r"mean \(0.4, 0.5, 0.6\), std \(0.2, 0.2, 0.2\)"):
        outputs = gpupool.predict(result.model, train_set, pool=pools[2])
    assert torch.equal(outputs, expected)
    assert result.best is not None
    accuracy = gpupool.evaluate(result.model, normalized, pool=pools[2])["accuracy"]
    assert result.best.accuracy == pytest.approx(accuracy)
    with raises(OptionsError, "dataset"):
        gpupool.evaluate(result.model, train_set.with_normalization(0.1, 0.2), pool=pools[2])
    with raises(OptionsError, "validation"):
        train_on(pools[2], model, normalized, validation=train_set.with_normalization(0.1, 0.2))


def test_a_file_cannot_bring_anything_but_plain_values() -> None:
    known = NetworkInfo(("a",), ((0.5,), (0.25,)), (3, 8, 8))
    assert NetworkInfo.of_plain(asdict(known)) == known
    odd: Any
    for odd in (None, 3, {"classes": [1], "normalization": [[1.0]], "input_shape": [-3]}, {}):
        assert NetworkInfo.of_plain(odd) == NetworkInfo()
