"""Every row of docs/data.md runs, and changes image and mask alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
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


def test_every_row_is_tried() -> None:
    assert (len(AUGMENTERS), len(DATASTORES)) == (15, 20)


@pytest.mark.parametrize("name", AUGMENTERS)
def test_augmentation_changes_image_and_mask_alike(name: str, seg: SegmentationDatastore) -> None:
    varied = seg.with_transform(eval(AUGMENTERS[name], NAMES))
    for epoch in range(5):
        image, mask = varied.decode(0, varied.fetch(0), Draw(0, epoch))
        assert image.shape[-2:] == mask.shape
        if "gray" not in name:
            inside = mask >= 0
            assert (image[0][inside] - mask[inside]).abs().max() <= 1, name


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
