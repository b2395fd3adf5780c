"""What every datastore can do: read from S3 and a disk, take apart, split, check, look."""

from __future__ import annotations

import io
import os
import pickle
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from demo.photos import FASHION
from gpupool.core.errors import OptionsError
from gpupool.data.datastores.images import ImageDatastore
from gpupool.data.datastores.labels import split
from gpupool.data.reading.samples import Normalization
from tests.data.pictures import fill, image_file, values
from tests.servers.s3 import SeaweedServer
from tests.support.raising import raises


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> ImageDatastore:
    return fill(tmp_path_factory.mktemp("images"), a=10, b=5, c=1)


@pytest.fixture
def train(s3: SeaweedServer, photos_url: str) -> ImageDatastore:
    os.environ.update(s3.env)
    return ImageDatastore(f"{photos_url}/train")


def named(ds: ImageDatastore) -> list[tuple[str, str]]:
    return [(path, ds.classes[label]) for path, label in zip(ds.paths, ds.labels, strict=True)]


def test_lists_and_labels_a_bucket(train: ImageDatastore, s3: SeaweedServer) -> None:
    assert train.count_each_label() == dict.fromkeys(sorted(FASHION), 20)
    assert train.labels.dtype == np.int64
    assert train.paths[0].startswith("s3://photos/train/ankle-boot/")
    assert repr(train) == "ImageDatastore(200 images, 10 classes, s3://photos/train)"
    images, labels = next(iter(DataLoader(train, len(train))))
    assert (images.shape, labels.tolist()) == ((200, 3, 28, 28), train.labels.tolist())
    image, label = train[-1]
    assert (image.dtype, image.shape, label, type(label)) == (torch.uint8, (3, 28, 28), 9, int)
    with pytest.raises(IndexError):
        train[200]
    data = pickle.dumps(train)
    assert len(data) < 200 * 80
    assert s3.env["AWS_SECRET_ACCESS_KEY"].encode() not in data
    assert torch.equal(pickle.loads(data)[5][0], train[5][0])


def test_a_relative_path_is_fixed_where_it_was_given(ds: ImageDatastore) -> None:
    before = os.getcwd()
    os.chdir(ds.url)
    try:
        relative = ImageDatastore(".")
    finally:
        os.chdir(before)
    assert (relative.url, values(relative)) == (ds.url, list(range(16)))


def test_a_transform_is_applied_to_each_image(ds: ImageDatastore) -> None:
    large = ds.with_transform(v2.Resize((8, 6)))
    assert [tuple(image.shape) for image, _ in large.__getitems__(range(16))] == [(3, 8, 6)] * 16
    assert large.with_transform(lambda image: int(image.max()))[9] == (9, 0)
    assert large.with_transform(None)[0][0].shape == ds[0][0].shape == (3, 3, 4)
    with pytest.raises(ZeroDivisionError) as caught:
        ds.with_transform(lambda image: 1 / 0)[3]
    assert caught.value.__notes__ == [f"The transform raised this for {ds.paths[3]}"]


PARTS = st.lists(st.integers(0, 15), max_size=20)


@given(PARTS, st.integers(1, 4))
def test_whatever_is_taken_apart_keeps_its_label(
    ds: ImageDatastore, part: list[int], cut: int
) -> None:
    own = ds.subset(part)
    expected = named(own)
    assert expected == [named(ds)[index] for index in part]
    parts = [own.partition(cut, index) for index in range(cut)]
    assert sorted(chain.from_iterable(map(named, parts))) == sorted(expected)
    with raises(OptionsError, "partition"):
        own.partition(cut, cut)
    back = pickle.loads(pickle.dumps(own.shuffle(3)))
    assert sorted(named(back)) == sorted(expected)
    assert named(back) == named(own.shuffle(3))


def test_classes_can_be_counted_as_another_set_counts_them(ds: ImageDatastore) -> None:
    changed = ds.with_classes(["c", "more", "b", "a"])
    assert named(changed) == named(ds)
    assert changed.count_each_label() == {"c": 1, "more": 0, "b": 5, "a": 10}
    with raises(OptionsError, "['a', 'b']", "of c,"):
        ds.with_classes(["a", "b"])
    with raises(OptionsError, "classes"):
        ds.with_classes(["a", "b", "c", "c"])


def test_images_may_have_no_labels(ds: ImageDatastore) -> None:
    new = ImageDatastore(ds.url, labels=None)
    assert (new.classes, new.count_each_label(), set(new.labels.tolist())) == ([], {}, {-100})
    assert new[3][1] == -100
    assert [picture.label for picture in new.preview(2)] == ["", ""]
    with raises(OptionsError, "subset"):
        new.split_each_label(0.5)


def test_normalization_is_plain_data(ds: ImageDatastore) -> None:
    changed = ds.with_normalization(mean=(0.1, 0.2, 0.3), std=0.5)
    assert changed.subset([1]).normalization == Normalization((0.1, 0.2, 0.3), (0.5, 0.5, 0.5))
    assert changed[0][0].dtype == torch.uint8
    assert changed.with_normalization(None).normalization is None
    numbers: Any = (np.float64(0.5), np.array([0.5, 0.5, 0.5]))
    assert ds.with_normalization(*numbers).normalization == Normalization((0.5,) * 3, (0.5,) * 3)
    for wrong in ((124, 58), (0.5, 0), ("0.5", 1), (0.5, None), ((0.1, 0.2), 1)):
        nonsense: Any = wrong
        with raises(OptionsError, "mean"):
            ds.with_normalization(*nonsense)


@pytest.fixture(scope="module")
def faulty(s3: SeaweedServer) -> str:
    photo = image_file(7, (64, 64), "JPEG")
    files = {"a/cut": photo[:300], "a/empty": b"", "a/good": photo, "a/text": b"this is no image"}
    files |= {"b/changed": photo, "b/gone": photo, "b/good": photo}
    url = s3.make_bucket("faulty")
    s3.put_objects("faulty", {f"{name}.jpg": data for name, data in files.items()})
    return url


def test_check_finds_each_fault_in_a_bucket(s3: SeaweedServer, faulty: str) -> None:
    os.environ.update(s3.env)
    ds = ImageDatastore(faulty).with_transform(lambda image: 1 / 0)
    s3.put_objects("faulty", {"b/changed.jpg": image_file(8, (65, 65), "JPEG")})
    s3.client().delete_object(Bucket="faulty", Key="b/gone.jpg")
    result = ds.check()
    assert [row[:3] for row in result.rows] == [
        (f"{faulty}/a/cut.jpg", "a", "damaged"),
        (f"{faulty}/a/empty.jpg", "a", "empty"),
        (f"{faulty}/a/text.jpg", "a", "damaged"),
        (f"{faulty}/b/changed.jpg", "b", "changed"),
        (f"{faulty}/b/gone.jpg", "b", "missing"),
    ]
    first, header, line, *_ = repr(result).splitlines()
    assert first == "5 of 7 images cannot be used: 2 damaged, 1 changed, 1 empty, 1 missing."
    assert header.split() == ["image", "class", "reason", "what", "is", "wrong"]
    assert line.startswith(f"{faulty}/a/cut.jpg  ")
    good = ds.with_transform(None).subset(result.good)
    assert [path.removeprefix(faulty) for path in good.paths] == ["/a/good.jpg", "/b/good.jpg"]
    assert repr(good.check()) == "All 2 images can be read."
    assert pickle.loads(pickle.dumps(result)).good.sum() == 2


def test_preview_takes_from_each_class_in_turn(ds: ImageDatastore, tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(image_file(200, (1000, 400)))
    (tmp_path / "1.png").write_bytes(b"no image")
    preview = ds.preview(5)
    assert [picture.label for picture in preview] == ["a", "b", "c", "a", "b"]
    assert preview.title == f"5 of {ds!r}"
    assert repr(preview).splitlines()[2] == f"b          4 x 3  {ds.url}/b/00.png"
    assert Image.open(io.BytesIO(preview[1].png)).getpixel((0, 0)) == (10, 10, 10)
    large, bad = ImageDatastore(str(tmp_path)).preview()
    assert (large.width, large.height) == (1000, 400)
    assert Image.open(io.BytesIO(large.png)).size == (128, 51)
    assert (bad.png, bad.problem) == (b"", "damaged")
    with raises(OptionsError, "num_images", "1..200"):
        ds.preview(201)


LABELS = st.lists(st.integers(0, 3), min_size=1, max_size=60).map(np.array)
FRACTIONS = st.lists(st.floats(0.05, 0.9), min_size=1, max_size=3).filter(lambda f: sum(f) <= 1)
SEEDS = st.none() | st.integers(0, 2**32)


@given(LABELS, FRACTIONS, SEEDS)
def test_a_split_gives_each_index_once_and_cuts_each_class_alike(
    labels: np.ndarray, sizes: list[float], seed: int | None
) -> None:
    try:
        parts = split(labels, "abcd", sizes, seed)
    except OptionsError:  # of few samples: a part that is less than half a sample of each class
        assert min([*sizes, 1 - sum(sizes)]) * max(np.bincount(labels)) <= 1
        return
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    for own in range(4):
        total = int((labels == own).sum())
        taken = np.cumsum([int((labels[part] == own).sum()) for part in parts])
        for cut, size in zip(taken.tolist(), np.cumsum(sizes).tolist(), strict=False):
            assert abs(cut - size * total) <= 0.5 + 1e-6
    assert all(map(np.array_equal, parts, split(labels, "abcd", sizes, seed)))


@given(LABELS, st.lists(st.integers(1, 5), min_size=1, max_size=3), SEEDS)
def test_a_split_by_counts_is_exact(labels: np.ndarray, sizes: list[int], seed: int | None) -> None:
    counts = np.bincount(labels, minlength=4)
    try:
        parts = split(labels, "abcd", sizes, seed)
    except OptionsError:
        assert counts.min() < sum(sizes) or (counts == sum(sizes)).all()
        return
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    for part, size in zip(parts, sizes, strict=False):
        assert np.bincount(labels[part], minlength=4).tolist() == [size] * 4
    if seed is None:
        assert {np.flatnonzero(labels == own)[0] for own in range(4)} <= set(parts[0].tolist())


@pytest.mark.parametrize(
    "sizes", [(), (0.0,), (1.0,), (1.5,), (0.6, 0.6), (0.5, 2), (0,), (True,), (0.99,), (5, 5)]
)
def test_impossible_sizes_say_what_to_give(sizes: tuple[float, ...]) -> None:
    with raises(OptionsError, "split_each_label("):
        split(np.zeros(9, np.int64), "a", sizes, None)
