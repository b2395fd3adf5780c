"""Labels from folders, functions and tables of all kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import pytest

from gpupool.core.errors import DataError, OptionsError
from gpupool.data.datastores.images import ImageDatastore
from tests.data.pictures import image_file
from tests.support.raising import raises

FILES = ("x/1.png", "x/2.png", "y/3.jpg", "4.png")
TABLE = {"x/1.png": "cat", "x/2.png": "dog", "y/3.jpg": "cat"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("labels")
    for name in FILES:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(image_file())
    return root


def labels_of(folder: Path, labels: Any) -> dict[str, str]:
    """Path below `folder` -> label."""
    ds = ImageDatastore(str(folder), labels=labels)
    names = [path.removeprefix(f"{folder}/") for path in ds.paths]
    return dict(zip(names, (ds.classes[label] for label in ds.labels), strict=True))


def test_a_table_chooses_images_and_labels(folder: Path) -> None:
    frame = pandas.DataFrame({"path": list(TABLE), "label": list(TABLE.values()), "more": 1})
    for table in (
        TABLE,
        {path.rsplit(".", 1)[0]: label for path, label in TABLE.items()},
        {f"{folder}/{path}": label for path, label in TABLE.items()},
        frame,
    ):
        assert labels_of(folder, table) == TABLE
    numbers = {"x/1.png": "10", "x/2.png": "9", "y/3.jpg": "10"}
    assert labels_of(folder, frame.assign(label=[10, 9, 10])) == numbers
    assert ImageDatastore(str(folder), labels=numbers).classes == ["9", "10"]


def test_a_function_chooses_images_and_labels(folder: Path) -> None:
    found = labels_of(folder, lambda url: None if url.endswith("jpg") else int(Path(url).stem) % 2)
    assert found == {"x/1.png": "1", "x/2.png": "0", "4.png": "0"}


@pytest.mark.parametrize(
    ("labels", "error", "shown"),
    [
        ({"x/1.png": "cat", "nine": "dog", "": "cat"}, DataError, ("2 of 3 ", " nine; ")),
        (pandas.DataFrame({"path": ["4", "4"], "label": ["a", "b"]}), DataError, "'b'"),
        (pandas.DataFrame({"file": ["4"], "label": ["a"]}), OptionsError, '"path"'),
        ({"4": 0.5}, OptionsError, " 0.5 "),
        ({"4": True}, OptionsError, " True "),
        (lambda url: 0.5, OptionsError, ("0.5", "4.png")),
        ({}, DataError, " None "),
        (lambda url: "", DataError, "''"),
        ("table.csv", OptionsError, "'table.csv'"),
    ],
)
def test_labels_that_do_not_fit(folder: Path, labels: Any, error: Any, shown: Any) -> None:
    with raises(error, shown):
        labels_of(folder, labels)


def test_the_order_of_classes_can_be_given(folder: Path) -> None:
    ds = ImageDatastore(str(folder), labels=TABLE, classes=["dog", "bird", "cat"])
    assert ds.count_each_label() == {"dog": 1, "bird": 0, "cat": 2}
    with raises(OptionsError, "cat", "['dog']"):
        ImageDatastore(str(folder), labels=TABLE, classes=["dog"])
    with raises(OptionsError, "classes"):
        ImageDatastore(str(folder), labels=TABLE, classes=["dog", "dog", "cat"])
