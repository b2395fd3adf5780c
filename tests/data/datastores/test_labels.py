"""Labels of all kinds; nothing is left out, and none is guessed, in silence."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pandas
import pytest

from gpupool.core.errors import DataError, OptionsError
from gpupool.data.datastores.images import ImageDatastore
from gpupool.data.datastores.tar import TarDatastore
from gpupool.data.segmentation.datastore import SegmentationDatastore
from gpupool.data.stores.folder import Folder
from tests.data.datastores.test_tar import shard
from tests.data.pictures import image_file
from tests.support.raising import raises

FILES = ("x/1.png", "x/2.png", "y/3.jpg", "4.png")
TABLE = {"x/1.png": "cat", "x/2.png": "dog", "y/3.jpg": "cat"}


def put(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(image_file())
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return put(tmp_path_factory.mktemp("labels"), *FILES)


def labels_of(folder: Path, labels: Any) -> dict[str, str]:
    ds = ImageDatastore(str(folder), labels=labels)
    names = [path.removeprefix(f"{folder}/") for path in ds.paths]
    return dict(zip(names, (ds.classes[label] for label in ds.labels), strict=True))


def test_a_function_chooses_images_and_labels(folder: Path) -> None:
    found = labels_of(folder, lambda url: None if url.endswith("jpg") else int(Path(url).stem) % 2)
    assert found == {"x/1.png": "1", "x/2.png": "0", "4.png": "0"}
    table = {f"{folder}/{path}": label for path, label in TABLE.items()}
    assert labels_of(folder, table.get) == TABLE


@pytest.mark.parametrize(
    ("labels", "error", "shown"),
    [
        (TABLE, OptionsError, "lambda url: "),
        (pandas.DataFrame({"path": ["4"], "label": ["a"]}), OptionsError, "lambda url: "),
        (lambda url: True, OptionsError, " True "),
        (lambda url: 0.5, OptionsError, ("0.5", "4.png")),
        (lambda url: None, DataError, " None "),
        (lambda url: "", DataError, "''"),
        ("table.csv", OptionsError, "'table.csv'"),
    ],
)
def test_labels_that_do_not_fit(folder: Path, labels: Any, error: Any, shown: Any) -> None:
    with raises(error, shown):
        labels_of(folder, labels)


def told(make: Callable[..., Any], *places: Path, **options: Any) -> tuple[Any, list[str]]:
    """The datastore of folders, and the warnings when it is made, which lie in this file."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        ds = make(*map(str, places), **options)
    assert {warning.filename for warning in found} <= {__file__}
    return ds, [str(warning.message) for warning in found]


def test_links_to_folders_are_entered_and_circles_end(tmp_path: Path) -> None:
    put(tmp_path, "store/b/1.png", "store/b/deep/2.png", "mine/a/1.png")
    mine = tmp_path / "mine"
    for name, target in {
        "b": tmp_path / "store" / "b",
        "a/deep": tmp_path / "store" / "b" / "deep",
        "a/back": mine,
        "a/itself": mine / "a",
        "a/3.png": mine / "a" / "1.png",
    }.items():
        (mine / name).symlink_to(target)
    ds = ImageDatastore(str(mine), labels=lambda url: url[len(f"{mine}/") :].split("/")[0])
    assert ds.count_each_label() == {"a": 3, "b": 2}
    (tmp_path / "root").symlink_to(mine)
    assert len(ImageDatastore(str(tmp_path / "root"), labels=None)) == 5
    assert len(ImageDatastore(f"file://{mine}", labels=None)) == 5


def test_what_can_be_neither_read_nor_entered_is_named(tmp_path: Path) -> None:
    put(tmp_path, "a/1.png")
    for make in (
        lambda place: place.symlink_to(tmp_path / "nowhere"),
        lambda place: place.symlink_to(place),
        os.mkfifo,
    ):
        place = tmp_path / "a" / "odd"
        make(place)
        with raises(DataError, kind="unreadable", url=str(place)):
            Folder(str(tmp_path)).list_files()
        place.unlink()


def test_tars_say_what_they_leave_out(tmp_path: Path) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    (tmp_path / "0.tar").write_bytes(shard(0, 2, bmp=b"x"))
    (tmp_path / "1.tar.gz").write_bytes(b"x")
    _, found = told(TarDatastore, tmp_path)
    assert [".gz 1" in found[0], ".bmp 2" in found[1]] == [True, True]


@pytest.mark.parametrize("sign", ["\\", "%2F"])
def test_names_with_other_slashes_say_no_class(sign: str) -> None:
    root = f"memory://slashes{len(sign)}"
    names = [f"set{sign}a{sign}1.png", f"set{sign}b{sign}1.png"]
    fsspec.filesystem("memory").pipe({f"/slashes{len(sign)}/{name}": b"x" for name in names})
    with raises(DataError, "labels=", f"{root}/{names[0]}", kind="slashes"):
        ImageDatastore(root)
    ds = ImageDatastore(root, labels=lambda url: url.split(sign)[-2])
    assert ds.classes == ["a", "b"]


READINGS = [  # files, and whether they can be read in several ways
    ("a/1.png b/1.png", False),
    ("train/cat/1.png train/dog/1.png", False),
    ("1.png 2.png", False),
    ("a/day1/1.png a/day2/1.png b/day1/1.png", True),
    ("a/day1/1.png b/day2/1.png", True),
    ("train/cat/1.png validation/cat/1.png", True),
    ("a/1.png b/1.png cover.png", True),
    ("a/1.png a/more/2.png b/1.png", True),
]


@pytest.mark.parametrize(("names", "are_told"), READINGS)
def test_folders_with_two_readings_are_told(tmp_path: Path, names: str, are_told: bool) -> None:
    ds, found = told(ImageDatastore, put(tmp_path, *names.split()))
    assert len(found) == are_told
    assert (tmp_path.name in ds.classes) == (ds.url in map(os.path.dirname, ds.paths))
    for said in found:
        assert "labels=" in said
        assert sum(path in said for path in ds.paths) == 2
        assert told(ImageDatastore, tmp_path, labels=lambda url: "any")[1] == []


def test_pictures_of_other_formats_are_counted(tmp_path: Path) -> None:
    put(tmp_path, "a/1.png", "a/2.BMP", "b/1.PNG", "b/2.jfif", "b/3.bmp", "b/notes.txt")
    ds, (said,) = told(ImageDatastore, tmp_path)
    assert len(ds) == 2
    for word in ("3 ", ".bmp 2", ".jfif 1", "extensions="):
        assert word in said
    assert "txt" not in said
    assert len(told(ImageDatastore, tmp_path, extensions=".png")[0]) == 2  # no letters one by one
    chosen, none = told(ImageDatastore, tmp_path, extensions=(".png", ".bmp", ".jfif"))
    assert (len(chosen), none) == (5, [])
    masks = {"mask_extensions": [".png"]}
    _, (said,) = told(SegmentationDatastore, tmp_path / "a", tmp_path / "a", **masks)
    assert ".bmp 1" in said


def test_a_name_that_is_no_text_comes_back_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path / "a") + b"/\xff.png")).write_bytes(image_file(7))
    back = pickle.loads(pickle.dumps(ImageDatastore(str(tmp_path))))
    assert int(back[0][0].max()) == 7
