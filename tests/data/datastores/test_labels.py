"""Labels from folders, functions and tables of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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


class Frame:
    """A data frame as far as all kinds of them agree: `columns`, and each by its name."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns = list(columns)
        self._data = columns

    def __getitem__(self, name: str) -> list[Any]:
        return self._data[name]


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path,
        lambda path: path.rsplit(".", 1)[0],
    ],
    ids=["path", "without extension"],
)
def test_a_mapping_chooses_images_and_labels(folder: Path, write: Callable[[str], str]) -> None:
    assert labels_of(folder, {write(path): label for path, label in TABLE.items()}) == TABLE


def test_a_table_may_hold_urls(folder: Path) -> None:
    assert labels_of(folder, {f"{folder}/{path}": label for path, label in TABLE.items()}) == TABLE


def test_a_data_frame(folder: Path) -> None:
    paths, labels = list(TABLE), list(TABLE.values())
    assert labels_of(folder, Frame(path=paths, label=labels, more=[1, 2, 3])) == TABLE
    assert labels_of(folder, Frame(file=paths, kind=labels)) == TABLE
    named = Frame(a=[0, 0, 0], kind=labels, file=paths)
    with raises(OptionsError, "labels", " a, kind, file;"):
        labels_of(folder, named)


def test_data_frames_of_pandas(folder: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"path": list(TABLE), "label": list(TABLE.values())})
    assert labels_of(folder, frame) == TABLE
    numbers = frame.assign(label=[10, 9, 10])
    assert labels_of(folder, numbers) == {"x/1.png": "10", "x/2.png": "9", "y/3.jpg": "10"}


@pytest.mark.parametrize(
    ("labels", "error", "shown"),
    [
        ({"x/1.png": "cat", "nine": "dog"}, DataError, ("1 of 2 ", " nine; ")),
        (Frame(path=["4", "4"], label=["a", "b"]), DataError, ("'a'", "'b'")),
        ({"4": 0.5}, OptionsError, " 0.5 "),
        ({"4": True}, OptionsError, " True "),
        ({}, DataError, " 4 "),
        ("table.csv", OptionsError, "'table.csv'"),
    ],
)
def test_tables_that_do_not_fit(folder: Path, labels: Any, error: Any, shown: Any) -> None:
    with raises(error, "labels", shown):
        labels_of(folder, labels)


def test_numbers_are_sorted_as_numbers_where_they_are_no_folders(folder: Path) -> None:
    def number(url: str) -> str:
        return {"1": "10", "2": "9", "3": "9", "4": "100"}[Path(url).stem]

    assert ImageDatastore(str(folder), labels=number).classes == ["9", "10", "100"]


def test_the_order_of_classes_can_be_given(folder: Path) -> None:
    ds = ImageDatastore(str(folder), labels=TABLE, classes=["dog", "bird", "cat"])
    assert ds.count_each_label() == {"dog": 1, "bird": 0, "cat": 2}
    with raises(DataError, "cat", "['dog']", kind="unknown class"):
        ImageDatastore(str(folder), labels=TABLE, classes=["dog"])
    with raises(OptionsError, "classes"):
        ImageDatastore(str(folder), labels=TABLE, classes=["dog", "dog", "cat"])
