"""Every row of docs/data.md does what MATLAB's name for it says."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2

from gpupool import ImageDatastore, SegmentationDatastore
from gpupool.data.reading.samples import Draw
from gpupool.data.segmentation.patches import RandomPatches
from tests.data.pictures import image_file

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
HEIGHT, WIDTH = 41, 61
NAMES = {"v2": v2, "tv_tensors": tv_tensors, "height": HEIGHT, "width": WIDTH}


def rows(*headings: str) -> dict[str, str]:
    """First to second column of the tables with such headings."""
    tables = PAGE.read_text().split("\n\n")
    found: dict[str, str] = {}
    for table in tables:
        lines = [line.strip("|").split(" | ") for line in table.splitlines()]
        if lines[0][0].strip(" `") in headings:
            found |= {first.strip(): second.strip(" `") for first, second in lines[2:]}
    return found


AUGMENTERS = rows("imageDataAugmenter", "augmentedImageDatastore")
DATASTORES = rows("MATLAB")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of two classes; and one large image, each pixel of which tells its place, with a mask
    that does."""
    folder = tmp_path_factory.mktemp("docs")
    for path in ("train/a/1.png", "train/a/2.png", "train/b/3.png", "train/b/4.png"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(image_file(7))
    lines, columns = np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.uint8)
    for kind in ("images", "masks"):
        (folder / kind).mkdir()
    pixels = np.stack([lines, columns, np.full_like(lines, 200)], -1)
    Image.fromarray(pixels).save(folder / "images" / "1.png")
    Image.fromarray(lines).save(folder / "masks" / "1.png")
    return folder


@pytest.fixture(scope="module")
def seg(folder: Path) -> SegmentationDatastore:
    return SegmentationDatastore(str(folder / "images"), str(folder / "masks"))


Pixels = tuple[torch.Tensor, torch.Tensor]
Samples = list[Pixels]


@cache
def grid() -> Pixels:
    lines, columns = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
    return lines, columns


def place(sample: Pixels, line: int, column: int) -> tuple[int, int]:
    """Where the pixel comes from that is now at this offset from the middle."""
    image, mask = sample
    at = HEIGHT // 2 + line, WIDTH // 2 + column
    assert mask[at] == image[0][at]  # the mask went along
    return int(image[0][at]) - HEIGHT // 2, int(image[1][at]) - WIDTH // 2


def flips(samples: Samples, dimension: int) -> None:
    original = torch.stack(grid())
    kinds = [original, original.flip(dimension + 1)]
    seen = [[torch.equal(image[:2], kind) for kind in kinds].index(True) for image, _ in samples]
    assert set(seen) == {0, 1}


def turns(samples: Samples) -> None:
    angles = [math.degrees(math.atan2(*place(sample, 0, 15))) for sample in samples]
    assert all(-23 <= angle <= 23 for angle in angles)
    assert max(angles) - min(angles) > 15


def scales(samples: Samples) -> None:
    factors = [15 / place(sample, 0, 15)[1] for sample in samples]
    assert all(0.75 <= factor <= 1.3 for factor in factors)
    assert max(factors) - min(factors) > 0.2
    assert all(abs(place(sample, 0, 15)[0]) <= 1 for sample in samples)


def stretches(samples: Samples) -> None:
    shapes = []
    for image, _ in samples:
        assert image.shape == (3, 40, 60)
        corners = image[:2, 0, 0].int(), image[:2, -1, -1].int()
        height, width = (corners[1] - corners[0]).tolist()
        shapes.append((width / 60) / (height / 40))
    assert min(shapes) < 0.95
    assert max(shapes) > 1.05


def shears(samples: Samples, along: int) -> None:
    """One step to the side along one dimension changes the other coordinate by tan(angle)."""
    step = (15, 0) if along == 1 else (0, 15)
    moved = [place(sample, *step) for sample in samples]
    assert all(abs(to[along]) <= 15 * math.tan(math.radians(10)) + 1 for to in moved)
    assert len({to[along] for to in moved}) > 2
    assert all(abs(to[1 - along] - 15) <= 1 for to in moved)


def moves(samples: Samples, along: int) -> None:
    moved = [place(sample, 0, 0) for sample in samples]
    assert {to[along] for to in moved} >= {-2, -1, 0, 1, 2}
    assert all(abs(to[along]) <= 3 and to[1 - along] == 0 for to in moved)


def fills(samples: Samples) -> None:
    for image, mask in samples:
        assert image[:, 0, 0].tolist() == [128, 128, 128]
        assert mask[0, 0] == -100


def resizes(samples: Samples) -> None:
    for image, mask in samples:
        assert (image.shape, mask.shape) == ((3, 20, 30), (20, 30))
        assert image[0, -1, 0] >= HEIGHT - 3
        assert image[1, 0, -1] >= WIDTH - 3


def crops(samples: Samples, num_places: int) -> None:
    corners = set()
    for image, mask in samples:
        top, left = (int(value) for value in image[:2, 0, 0])
        lines, columns = (part[top : top + 20, left : left + 30] for part in grid())
        assert torch.equal(image[:2], torch.stack([lines, columns]))
        assert torch.equal(mask, lines)
        corners.add((top, left))
    assert len(corners) >= num_places
    if num_places == 1:
        assert corners <= {(10, 15), (11, 16), (10, 16), (11, 15)}


def stays(samples: Samples) -> None:
    assert all(torch.equal(image[:2], torch.stack(grid())) for image, _ in samples)


def is_grey(samples: Samples) -> None:
    for image, _ in samples:
        assert image.shape == (1, HEIGHT, WIDTH)
        assert image[0, 0, 0] == int(0.114 * 200)


CHECKS: dict[str, Callable[[Samples], None]] = {
    "`RandXReflection=true`": lambda samples: flips(samples, 1),
    "`RandYReflection=true`": lambda samples: flips(samples, 0),
    "`RandRotation=[-20 20]`": turns,
    "`RandScale=[0.8 1.25]`": scales,
    "`RandXScale`, `RandYScale`": stretches,
    "`RandXShear=[-10 10]`": lambda samples: shears(samples, 1),
    "`RandYShear=[-10 10]`": lambda samples: shears(samples, 0),
    "`RandXTranslation=[-3 3]`": lambda samples: moves(samples, 1),
    "`RandYTranslation=[-3 3]`": lambda samples: moves(samples, 0),
    "`FillValue=128`": fills,
    '`OutputSizeMode="resize"`': resizes,
    '`OutputSizeMode="centercrop"`': lambda samples: crops(samples, 1),
    '`OutputSizeMode="randcrop"`': lambda samples: crops(samples, 5),
    '`ColorPreprocessing="gray2rgb"`': stays,
    '`ColorPreprocessing="rgb2gray"`': is_grey,
}


def test_every_row_is_tried() -> None:
    assert list(AUGMENTERS) == list(CHECKS)
    assert len(DATASTORES) == 20


@pytest.mark.parametrize("name", CHECKS)
def test_augmentation_does_what_its_matlab_name_says(name: str, seg: SegmentationDatastore) -> None:
    varied = seg.with_transform(eval(AUGMENTERS[name], NAMES))
    fetched = varied.fetch(0)
    CHECKS[name]([varied.decode(0, fetched, Draw(0, epoch)) for epoch in range(30)])


@pytest.mark.parametrize("name", DATASTORES)
def test_datastores_do_what_their_matlab_name_says(
    name: str, folder: Path, seg: SegmentationDatastore
) -> None:
    ds = ImageDatastore(str(folder / "train"))
    own: dict[str, Any] = {
        **NAMES,
        "ImageDatastore": ImageDatastore,
        "SegmentationDatastore": SegmentationDatastore,
        "url": str(folder / "train"),
        "images": str(folder / "images"),
        "masks": str(folder / "masks"),
        "transform": v2.Identity(),
        "both": v2.RandomHorizontalFlip(),
        "ds": ds,
        "seg": seg,
    }
    made = eval(DATASTORES[name], own)
    if isinstance(made, ImageDatastore):
        assert len(made) in (2, 4)
        assert made[0][0].shape == (3, 3, 4)
    elif "colours" not in name and isinstance(made, (SegmentationDatastore, RandomPatches)):
        assert len(made) in (1, 8, 16)
    elif "splitEachLabel" in name:
        assert [part.count_each_label() for part in made] == [{"a": 1, "b": 1}] * 2
    else:
        assert made is not None
