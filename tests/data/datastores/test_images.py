"""Image datastores on a real S3 server, on disk and in memory."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from demo.photos import FASHION
from gpupool.core.errors import DataError, DataNotFoundError, OptionsError
from gpupool.data.datastores.images import ImageDatastore
from tests.data.pictures import fill, image_file, values
from tests.servers.s3 import SeaweedServer
from tests.support.raising import raises


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fill(tmp_path, a=10, b=5, c=1)
    return tmp_path


@pytest.fixture
def ds(folder: Path) -> ImageDatastore:
    return ImageDatastore(str(folder))


@pytest.fixture
def train(s3: SeaweedServer, photos_url: str) -> ImageDatastore:
    os.environ.update(s3.env)
    return ImageDatastore(f"{photos_url}/train")


def test_lists_and_labels_a_bucket(train: ImageDatastore) -> None:
    assert len(train) == 200
    assert train.classes == sorted(FASHION)
    assert train.count_each_label() == dict.fromkeys(sorted(FASHION), 20)
    assert train.labels.dtype == np.int64
    assert train.paths[0].startswith("s3://photos/train/ankle-boot/")
    assert repr(train) == "ImageDatastore(200 images, 10 classes, s3://photos/train)"


def test_a_sample_is_the_image_and_its_label(train: ImageDatastore) -> None:
    image, label = train[-1]
    assert image.dtype == torch.uint8
    assert image.shape == (3, 28, 28)
    assert image.float().std() > 10
    assert (label, type(label)) == (9, int)
    with pytest.raises(IndexError):
        train[200]


def test_a_batch_is_the_same_as_its_samples_one_by_one(train: ImageDatastore) -> None:
    indices = [3, 199, 0, 77, 3]
    for (image, label), index in zip(train.__getitems__(indices), indices, strict=True):
        expected_image, expected_label = train[index]
        assert torch.equal(image, expected_image)
        assert label == expected_label
    assert train.__getitems__([]) == []


def test_it_pickles_small_and_without_credentials(train: ImageDatastore, s3: SeaweedServer) -> None:
    train[0]
    data = pickle.dumps(train)
    assert len(data) < 200 * 40
    assert s3.env["AWS_SECRET_ACCESS_KEY"].encode() not in data
    assert torch.equal(pickle.loads(data)[5][0], train[5][0])


def test_a_class_folder_without_images_says_what_to_do(folder: Path) -> None:
    (folder / "d").mkdir()
    (folder / "d" / "notes.txt").write_text("text")
    with raises(DataError, "/d ", kind="empty class"):
        ImageDatastore(str(folder))
    assert len(ImageDatastore(str(folder), labels=lambda path: "any")) == 16


def test_a_place_without_images_names_the_extensions(tmp_path: Path) -> None:
    with raises(DataNotFoundError, kind="missing", url=str(tmp_path / "none")):
        ImageDatastore(str(tmp_path / "none"))
    (tmp_path / "notes.txt").write_text("text")
    with raises(DataNotFoundError, ".jpg, .jpeg, ", kind="nothing"):
        ImageDatastore(str(tmp_path))


def test_labels_can_be_a_function_and_leave_images_out(folder: Path) -> None:
    def odd_or_nine(path: str) -> str | None:
        number = int(Path(path).stem)
        return "nine" if number == 9 else "odd" if number % 2 else None

    ds = ImageDatastore(str(folder), labels=odd_or_nine)
    assert ds.count_each_label() == {"nine": 1, "odd": 6}
    with raises(DataError, "labels", "16", kind="no labels"):
        ImageDatastore(str(folder), labels=lambda path: None)
    with raises(OptionsError, "labels", "a/00.png"):
        ImageDatastore(str(folder), labels=lambda path: 7)  # type: ignore[arg-type, return-value]
    with raises(OptionsError, "labels", "'folders'"):
        ImageDatastore(str(folder), labels="folders")  # type: ignore[arg-type]


def test_extensions_are_compared_without_case(folder: Path) -> None:
    (folder / "c" / "more.PNG").write_bytes(image_file())
    assert len(ImageDatastore(str(folder))) == 17
    (folder / "c" / "more.tif").write_bytes(b"not listed")
    assert len(ImageDatastore(str(folder / "c"), extensions=[".tif"])) == 1


def test_a_relative_path_is_fixed_where_it_was_given(folder: Path, tmp_path: Path) -> None:
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        ds = ImageDatastore(".")
    finally:
        os.chdir(before)
    assert ds.url == str(tmp_path)
    assert values(ds) == list(range(16))


def test_split_takes_the_first_images_unless_seeded(ds: ImageDatastore) -> None:
    first, _ = ds.split_each_label(1)
    assert values(first) == [0, 10, 15]
    drawn = [tuple(values(ds.split_each_label(1, seed=seed)[0])) for seed in (1, 1, 2, 3, 4)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 1


def test_other_impossible_arguments(ds: ImageDatastore) -> None:
    with raises(OptionsError, "index"):
        ds.partition(3, 3)
    with raises(OptionsError, "indices"):
        ds.subset([0.5])
    with raises(OptionsError, "transform"):
        ds.with_transform(7)  # type: ignore[arg-type]


def test_a_transform_is_applied_to_each_image(ds: ImageDatastore) -> None:
    large = ds.with_transform(v2.Resize((8, 6)))
    assert [tuple(image.shape) for image, _ in large.__getitems__(range(16))] == [(3, 8, 6)] * 16
    assert ds[0][0].shape == (3, 3, 4)
    assert large.with_transform(lambda image: int(image.max()))[9] == (9, 0)
    assert large.with_transform(None)[0][0].shape == (3, 3, 4)


def test_what_a_transform_raises_comes_out_and_names_the_image(ds: ImageDatastore) -> None:
    failing = ds.with_transform(lambda image: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.__getitems__(range(16))
    with pytest.raises(ZeroDivisionError) as caught:
        failing[3]
    assert caught.value.__notes__ == [f"The transform raised this for {ds.paths[3]}"]


def test_a_bad_image_is_named(folder: Path) -> None:
    (folder / "b" / "bad.png").write_bytes(b"this is text, not an image")
    with raises(DataError, "/b/bad.png ", kind="damaged"):
        ImageDatastore(str(folder)).__getitems__(range(17))
