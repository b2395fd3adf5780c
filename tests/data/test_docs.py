"""Every row of docs/data.md is code that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2

from gpupool import ImageDatastore, SegmentationDatastore
from gpupool.data.reading.samples import Draw
from tests.data.pictures import image_file

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
HEIGHT, WIDTH = 41, 61
NAMES = {"v2": v2, "tv_tensors": tv_tensors, "height": HEIGHT, "width": WIDTH}


def rows(*headings: str) -> dict[str, str]:
    """First to second column of the tables with such headings."""
    found: dict[str, str] = {}
    for table in PAGE.read_text().split("\n\n"):
        lines = [line.strip("|").split(" | ") for line in table.splitlines()]
        if lines[0][0].strip(" `") in headings:
            found |= {first.strip(): second.strip(" `") for first, second in lines[2:]}
    return found


AUGMENTERS = rows("imageDataAugmenter", "augmentedImageDatastore")
DATASTORES = rows("MATLAB")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of two classes; and one image with its mask."""
    folder = tmp_path_factory.mktemp("docs")
    for path in ("train/a/1.png", "train/a/2.png", "train/b/3.png", "train/b/4.png"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(image_file(7))
    pixels = Image.linear_gradient("L").resize((WIDTH, HEIGHT))
    for kind in ("images", "masks"):
        (folder / kind).mkdir()
        pixels.save(folder / kind / "1.png")
    return folder


@pytest.fixture(scope="module")
def seg(folder: Path) -> SegmentationDatastore:
    return SegmentationDatastore(str(folder / "images"), str(folder / "masks"))


def test_the_page_has_its_tables() -> None:
    assert (len(AUGMENTERS), len(DATASTORES)) == (15, 20)


def test_augmentation_changes_an_image_and_its_mask(seg: SegmentationDatastore) -> None:
    for row, code in AUGMENTERS.items():
        varied = seg.with_transform(eval(code, NAMES))
        image, mask = varied.decode(0, varied.fetch(0), Draw(0, 1))
        assert image.shape[-2:] == mask.shape, row


def test_datastores_do_what_their_matlab_name_says(
    folder: Path, seg: SegmentationDatastore
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
    for row, code in DATASTORES.items():
        made = eval(code, own)
        if isinstance(made, ImageDatastore):
            assert made[0][0].shape == (3, 3, 4), row
        elif "splitEachLabel" in row:
            assert [part.count_each_label() for part in made] == [{"a": 1, "b": 1}] * 2
        else:
            assert made is not None, row
