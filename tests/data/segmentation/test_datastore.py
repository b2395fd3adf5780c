"""Pairs of images and masks, and random patches of them; masks of every kind of file."""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2

from gpupool.core.errors import DataError, DataNotFoundError, OptionsError, SampleError
from gpupool.data.reading.samples import Draw, Samples
from gpupool.data.segmentation.datastore import MaskClasses, SegmentationDatastore, decode_mask
from gpupool.data.segmentation.patches import RandomPatches
from tests.support.raising import raises

HEIGHT, WIDTH = 40, 60
NUM_PAIRS = 6
CLASSES = {"even": [0, 2, 4, 6, 8], "odd": [1, 3, 5, 7, 9]}


def image_of(number: int) -> np.ndarray:
    """Every pixel tells its row, column, and which image it is of."""
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH]
    return np.stack([rows, columns, np.full_like(rows, number)], -1).astype(np.uint8)


def mask_of(number: int) -> np.ndarray:
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH]
    return ((rows + columns + number) % 12).astype(np.uint8)


def saved(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def png(pixels: np.ndarray) -> bytes:
    return saved(Image.fromarray(pixels))


def on_disk(folder: Path, **options: Any) -> SegmentationDatastore:
    return SegmentationDatastore(str(folder / "images"), str(folder / "masks"), **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(NUM_PAIRS):
        for kind, pixels in {"images": image_of(number), "masks": mask_of(number)}.items():
            path = tmp_path / kind / str(number // 3) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(pixels))
    return tmp_path


@pytest.fixture
def ds(folder: Path) -> SegmentationDatastore:
    return on_disk(folder, classes=CLASSES)


def expected(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    values = mask_of(number).astype(np.int64)
    mask = np.where(values < 10, values % 2, -100)
    return torch.from_numpy(image_of(number)).permute(2, 0, 1), torch.from_numpy(mask)


def equal(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


def test_a_sample_is_the_image_and_the_class_of_each_pixel(ds: SegmentationDatastore) -> None:
    assert isinstance(ds, Samples)
    assert repr(ds) == f"SegmentationDatastore(6 pairs, 2 classes, {ds.url})"
    train, rest = ds.split_each_label(4, seed=1)
    assert (len(train), len(rest)) == (4, 2)
    assert sorted(rest.paths + train.paths) == ds.paths
    for part in (ds, train, rest, ds.shuffle(3), ds.subset([5, 0])):
        samples = part.__getitems__(range(len(part)))
        for path, mask_path, sample in zip(part.paths, part.mask_paths, samples, strict=True):
            assert mask_path == path.replace("/images/", "/masks/")
            assert equal(sample, expected(int(Path(path).stem)))


def test_pixels_are_counted(ds: SegmentationDatastore, folder: Path) -> None:
    masks = np.stack([mask_of(number) for number in range(NUM_PAIRS)])
    known = masks[masks < 10]
    pixels = ds.count_each_label()
    assert pixels == {"even": int((known % 2 == 0).sum()), "odd": int((known % 2).sum())}
    as_is = on_disk(folder).subset([2]).count_each_label()
    assert as_is == {str(value): int((mask_of(2) == value).sum()) for value in range(12)}
    with raises(OptionsError, "['even']"):
        on_disk(folder).with_classes(["even"])
    unused = on_disk(folder, classes={"none": 99, "more": 100}).count_each_label()
    assert unused == {"none": 0, "more": 0}


def test_a_transform_changes_image_and_mask_alike(ds: SegmentationDatastore) -> None:
    both = v2.Compose([v2.RandomHorizontalFlip(1.0), v2.RandomCrop((20, 30))])
    drawn = [ds.with_transform(both).decode(0, ds.fetch(0), Draw(1, epoch)) for epoch in (2, 2, 3)]
    image, mask = drawn[0]
    whole, whole_mask = expected(0)
    top, left = int(image[0, 0, 0]), int(image[1, 0, -1])
    rows, columns = slice(top, top + 20), slice(left, left + 30)
    assert equal(drawn[0], (whole[:, rows, columns].flip(2), whole_mask[rows, columns].flip(1)))
    assert equal(drawn[1], drawn[0])
    assert not equal(drawn[2], drawn[0])
    turn = v2.RandomRotation((45, 45), fill={tv_tensors.Image: 0, tv_tensors.Mask: -100})
    image, mask = ds.with_transform(turn)[0]
    assert (type(image), type(mask), int(mask[0, 0])) == (torch.Tensor, torch.Tensor, -100)
    with raises(DataError, "transform", kind="type"):
        ds.with_transform(lambda image, mask: image)[0]


def test_files_without_a_partner_are_named(folder: Path) -> None:
    for number in range(4):
        (folder / "images" / f"more{number}.png").write_bytes(b"")
    (folder / "masks" / "0" / "1.png").rename(folder / "masks" / "alone.tif")
    shown = ("6 images", "/images/0/1.png", "/more1.png.")
    with raises(DataError, shown, kind="no partner"):
        on_disk(folder)


def test_a_function_can_say_which_mask_belongs_to_an_image(tmp_path: Path) -> None:
    for part in ("a", "b"):
        (tmp_path / "images" / part).mkdir(parents=True)
        (tmp_path / "masks").mkdir(exist_ok=True)
        (tmp_path / "images" / part / "1_left.png").write_bytes(png(image_of(1)))
        (tmp_path / "masks" / f"{part}_1_ids.png").write_bytes(png(mask_of(1)))

    def number(path: str) -> str:
        return re.sub(r"_(left|ids)\.png$", "", path).replace("/", "_")

    ds = on_disk(tmp_path, match=number)
    assert [Path(path).name for path in ds.mask_paths] == ["a_1_ids.png", "b_1_ids.png"]
    with raises(DataError, "/a/1_left.png", kind="no partner"):
        on_disk(tmp_path, match=lambda path: "x")
    with raises(OptionsError, "match", "'name'"):
        on_disk(tmp_path, match="name")
    with raises(DataNotFoundError, " masks ", ".tif", kind="nothing"):
        on_disk(tmp_path, mask_extensions=[".tif"])


def test_bad_pairs_are_found(folder: Path) -> None:
    (folder / "masks" / "0" / "0.png").write_bytes(png(mask_of(0))[:60])
    (folder / "masks" / "0" / "1.png").write_bytes(png(mask_of(0)[:10]))
    (folder / "images" / "1" / "3.png").write_bytes(b"text")
    ds = on_disk(folder)
    result = ds.check()
    assert np.flatnonzero(~result.good).tolist() == [0, 1, 3]
    assert {reason for _, _, reason, _ in result.rows} == {"damaged"}
    with raises(SampleError, "masks/0/1.png", "10 x 60", "0/1.png "):
        ds[1]
    with raises(SampleError, "masks/0/0.png"):
        ds.count_each_label()


def test_a_preview_shows_the_mask_over_the_image(ds: SegmentationDatastore) -> None:
    shown = np.asarray(Image.open(io.BytesIO(ds.preview(1)[0].png)).convert("RGB")).astype(int)
    image, is_odd = expected(0)[0].permute(1, 2, 0).numpy(), expected(0)[1].numpy() == 1
    assert np.array_equal(shown[~is_odd], image[~is_odd])
    assert (np.abs(shown[is_odd] - image[is_odd]).max(-1) > 50).all()


def test_patches_are_cut_at_the_same_place_of_both(ds: SegmentationDatastore) -> None:
    patches = ds.random_patches((16, 24), per_image=5)
    assert isinstance(patches, Samples)
    assert repr(patches) == f"RandomPatches(30 of 16 x 24 from {ds!r})"
    samples = patches.__getitems__(range(len(patches)))
    for index, (image, mask) in enumerate(samples):
        top, left, number = (int(value) for value in image[:, 0, 0])
        assert number == index // 5
        rows, columns = slice(top, top + 16), slice(left, left + 24)
        whole, whole_mask = expected(number)
        assert equal((image, mask), (whole[:, rows, columns], whole_mask[rows, columns]))
        assert image.untyped_storage().nbytes() == 3 * 16 * 24
    assert len({tuple(image[:2, 0, 0].tolist()) for image, _ in samples}) > 20
    assert equal(pickle.loads(pickle.dumps(patches))[-1], samples[-1])
    fetched = patches.fetch(3)
    one, same, epoch, seed = (
        patches.decode(3, fetched, Draw(*draw)) for draw in ((0, 1), (0, 1), (0, 2), (1, 1))
    )
    assert [equal(one, other) for other in (same, epoch, seed)] == [True, False, False]
    with pytest.raises(IndexError):
        patches[len(patches)]
    with raises(SampleError, "0/0.png", "40 x 60", "41 x"):
        ds.random_patches((41, 20), 2)[0]
    assert ds.random_patches([HEIGHT, WIDTH], 1)[0][0].shape == (3, HEIGHT, WIDTH)
    for name, wrong in {"size": (0, 2), "per_image": (8, 0)}.items():
        with raises(OptionsError, name):
            ds.random_patches(*wrong)


@given(
    num_pairs=st.integers(0, 40),
    per_image=st.integers(1, 20),
    batch_size=st.integers(1, 40),
    open_pairs=st.integers(1, 20),
)
def test_an_epoch_takes_every_patch_once_and_goes_through_groups_of_pairs(
    num_pairs: int, per_image: int, batch_size: int, open_pairs: int
) -> None:
    pairs: Any = range(num_pairs)
    patches = RandomPatches(pairs, (1, 1), per_image, open_pairs)
    taken = patches.epoch_order(7, 3, batch_size)
    assert sorted(taken) == list(range(num_pairs * per_image))
    assert np.array_equal(taken, patches.epoch_order(7, 3, batch_size))
    if batch_size == 1 and len(taken) > 20:
        assert not np.array_equal(taken, patches.epoch_order(7, 4, batch_size))
    places = np.argsort(taken).reshape(num_pairs, per_image)  # where the patches of a pair come
    for start in range(0, len(taken), batch_size):
        assert (np.diff(taken[start : start + batch_size] // per_image) >= 0).all()
        is_open = (places.min(1) < start + batch_size) & (places.max(1) >= start)
        assert is_open.sum() <= 2 * open_pairs + batch_size // per_image


# ---- masks ---------------------------------------------------------------------------------------

IDS = np.array([[0, 7, 26], [27, 255, 7]], np.uint8)
WIDE = IDS.astype(np.uint16) * 100
COLOURS = {0: (0, 0, 0), 7: (128, 64, 128), 26: (0, 0, 142), 27: (0, 0, 70), 255: (9, 9, 9)}
BY_ID = {"road": 7, "car": [26, 27], "none": 0}
BY_COLOUR = {"road": (128, 64, 128), "car": [(0, 0, 142), (0, 0, 70)], "none": (0, 0, 0)}
BY_PIXEL = [[2, 0, 1], [1, -100, 0]]

GREY = Image.fromarray(IDS)
PALETTE = Image.frombytes("P", GREY.size, GREY.tobytes())
PALETTE.putpalette([part for value in range(256) for part in COLOURS.get(value, (1, 2, 3))])
RGB = Image.fromarray(np.array([[COLOURS[int(v)] for v in row] for row in IDS], np.uint8))


@pytest.mark.parametrize(
    ("image", "classes", "expected"),
    [
        (GREY, BY_ID, BY_PIXEL),
        (PALETTE, BY_ID, BY_PIXEL),
        (PALETTE, BY_COLOUR, BY_PIXEL),
        (RGB, BY_COLOUR, BY_PIXEL),
        (RGB.convert("RGBA"), BY_COLOUR, BY_PIXEL),
        (GREY, None, IDS.tolist()),
        (PALETTE, None, IDS.tolist()),
        (Image.fromarray(WIDE), None, WIDE.tolist()),
        (Image.fromarray(IDS > 7), None, (IDS > 7).astype(int).tolist()),
        (Image.fromarray(WIDE), {"a": 700}, [[-100, 0, -100], [-100, -100, 0]]),
    ],
)
def test_pixels_become_classes(image: Image.Image, classes: Any, expected: Any) -> None:
    for kind in ("PNG", "TIFF"):
        mask = decode_mask(saved(image, kind), "x", MaskClasses.of(classes))
        assert mask.tolist() == expected
        assert mask.dtype == (torch.int32 if expected == WIDE.tolist() else torch.int16)


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"this is no image", "(BMP, GIF"),
        (saved(Image.new("L", (400, 400)))[:-30], " a mask: "),
        (saved(RGB), "(RGB); give classes="),
        (saved(Image.new("I", (2, 2), 70_000), "TIFF"), " 0..65535"),
        (saved(Image.new("F", (2, 2)), "TIFF"), "(F); give classes="),
        (saved(GREY.convert("LA")), "(LA); give classes="),
    ],
    ids=["text", "cut late", "colours", "large ids", "float", "alpha"],
)
def test_a_bad_mask_is_named(data: bytes, shown: str) -> None:
    url = "s3://b/1.png"
    with raises(SampleError, url, shown, url=url, reason="damaged"):
        decode_mask(data, url, MaskClasses.of(BY_ID))


@pytest.mark.parametrize(
    ("classes", "shown"),
    [
        ("road", ""),
        ({"road": -1}, "-1"),
        ({"road": (1, 2, 256)}, ""),
        ({"road": []}, ""),
        ({"road": 1, "car": (1, 2, 3)}, ""),
        ({"road": 1, "car": [2, 1]}, "[2, 1]"),
        ({"road": (1, 2, 3), "car": (1, 2, 3)}, "(1, 2, 3)"),
    ],
)
def test_impossible_classes_say_what_to_give(classes: Any, shown: str) -> None:
    with raises(OptionsError, "classes", shown):
        MaskClasses.of(classes)
