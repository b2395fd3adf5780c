"""Image datastores on a real S3 server, on disk and in memory."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from demo.photos import FASHION
from gpupool.core.errors import DataError, OptionsError
from gpupool.data.datastores.images import ImageDatastore
from tests.data.pictures import fill, values
from tests.servers.s3 import SeaweedServer
from tests.support.raising import raises


@pytest.fixture
def ds(tmp_path: Path) -> ImageDatastore:
    return fill(tmp_path, a=10, b=5, c=1)


@pytest.fixture
def train(s3: SeaweedServer, photos_url: str) -> ImageDatastore:
    os.environ.update(s3.env)
    return ImageDatastore(f"{photos_url}/train")


def test_lists_and_labels_a_bucket(train: ImageDatastore) -> None:
    assert train.count_each_label() == dict.fromkeys(sorted(FASHION), 20)
    assert train.labels.dtype == np.int64
    assert train.paths[0].startswith("s3://photos/train/ankle-boot/")
    assert repr(train) == "ImageDatastore(200 images, 10 classes, s3://photos/train)"
    image, label = train[-1]
    assert (image.dtype, image.shape, label, type(label)) == (torch.uint8, (3, 28, 28), 9, int)
    assert image.float().std() > 10
    with pytest.raises(IndexError):
        train[200]


def test_it_pickles_small_and_without_credentials(train: ImageDatastore, s3: SeaweedServer) -> None:
    train[0]
    data = pickle.dumps(train)
    assert len(data) < 200 * 80
    assert s3.env["AWS_SECRET_ACCESS_KEY"].encode() not in data
    assert torch.equal(pickle.loads(data)[5][0], train[5][0])


def test_a_relative_path_is_fixed_where_it_was_given(ds: ImageDatastore, tmp_path: Path) -> None:
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        ds = ImageDatastore(".")
    finally:
        os.chdir(before)
    assert ds.url == str(tmp_path)
    assert values(ds) == list(range(16))


def test_impossible_arguments(ds: ImageDatastore) -> None:
    wrong: Any = 7
    with raises(OptionsError, "indices"):
        ds.subset([0.5])
    with raises(OptionsError, "transform"):
        ds.with_transform(wrong)
    with raises(OptionsError, "['a', 'b']", "of c,"):
        ds.with_classes(["a", "b"])


def test_a_transform_is_applied_to_each_image(ds: ImageDatastore) -> None:
    large = ds.with_transform(v2.Resize((8, 6)))
    assert [tuple(image.shape) for image, _ in large.__getitems__(range(16))] == [(3, 8, 6)] * 16
    assert large.with_transform(lambda image: int(image.max()))[9] == (9, 0)
    assert large.with_transform(None)[0][0].shape == ds[0][0].shape == (3, 3, 4)
    with pytest.raises(ZeroDivisionError) as caught:
        ds.with_transform(lambda image: 1 / 0)[3]
    assert caught.value.__notes__ == [f"The transform raised this for {ds.paths[3]}"]


def test_a_bad_image_is_named(ds: ImageDatastore, tmp_path: Path) -> None:
    (tmp_path / "b" / "bad.png").write_bytes(b"this is text, not an image")
    with raises(DataError, "/b/bad.png ", kind="damaged"):
        ImageDatastore(str(tmp_path)).__getitems__(range(17))
