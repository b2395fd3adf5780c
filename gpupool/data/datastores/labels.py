"""Which label a file has: by its folder, a function, or a table. Runs anywhere; no torch."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpupool.core.errors import DataError, OptionsError
from gpupool.core.terminal import plain, without_controls
from gpupool.data.datastores.told import warn

Labels = Literal["foldernames"] | str | Callable[[str], str | None] | Mapping[str, Any] | Any
UrlOf = Callable[[int], str]
# What Windows and careless programs write for a slash.
_NO_SLASH = re.compile(r"\\|%2f|%5c", re.IGNORECASE)

_FUNCTION = "labels= a function from an image's URL to its label"


def label_files(
    paths: Sequence[str], url_of: UrlOf, labels: Labels, classes: Sequence[str] | None
) -> list[str | None]:
    """The label of each file, None for those to leave out.

    Args:
        paths: of the files, below the URL of their datastore.
        url_of: gives the URL of the file at a place in `paths`.
        labels: as of `ImageDatastore`, but not None.
        classes: the names that are expected, if they are given: folders then have one reading.

    Raises OptionsError for what is no label, DataError for names or a table that do not fit.
    """
    if is_by_folder(labels):
        return _by_folder(paths, url_of, is_clear=classes is not None)
    if isinstance(labels, Mapping):
        return _look_up(labels.items(), paths, url_of)
    # Before callables: neither library is imported, so an attribute has to show what it is.
    if hasattr(labels, "columns"):  # of pandas, polars ... ; a class is no data frame
        return _look_up(_rows(labels), paths, url_of)
    if callable(labels):
        return [_one(labels(url), url) for url in map(url_of, range(len(paths)))]
    raise OptionsError(
        f'labels={labels!r} must be "foldernames", a function of the URL, a mapping of paths to '
        "labels, or a data frame, as pandas.read_csv gives"
    )


def is_by_folder(labels: Labels) -> bool:
    """Whether `labels` says that folders are the labels."""
    # A data frame compares element by element, and has no truth.
    return isinstance(labels, str) and labels == "foldernames"


def indexed(
    labels: Sequence[str | None], classes: Sequence[str] | None, by_number: bool, shown_url: str
) -> tuple[list[int], NDArray[np.int32], tuple[str, ...]]:
    """The places that have a label, their indices, and the names of the classes.

    `classes`, where given, must hold every label. Else they are sorted as texts, as torchvision's
    ImageFolder does, whose networks exist; or, with `by_number` and if all are whole numbers, so
    that "10" follows "9".
    """
    kept = [place for place, label in enumerate(labels) if label is not None]
    if not kept:
        raise DataError(
            f"{shown_url}: labels= gave None for all {len(labels):,} images", "no labels"
        )
    names = _names({label for label in labels if label is not None}, classes, by_number)
    index_of: dict[str | None, int] = {name: index for index, name in enumerate(names)}
    return kept, np.array([index_of[labels[place]] for place in kept], np.int32), names


def check_names(classes: Sequence[str]) -> tuple[str, ...]:
    """`classes`, if they can be names of classes; raises OptionsError otherwise."""
    names = tuple(classes)
    if len(set(names)) != len(names) or not all(isinstance(name, str) for name in names):
        raise OptionsError(f"classes={list(names)!r} must be names, each once")
    return names


def _names(found: set[str], classes: Sequence[str] | None, by_number: bool) -> tuple[str, ...]:
    # Names are printed in tables, plots and errors.
    odd = next((label for label in found if not label or without_controls(label) != label), None)
    if odd is not None:
        raise DataError(
            f"there are images of {odd!r}; a class is named in one line of text", "class name"
        )
    # Sorted, as a set has no order: the indices must be those of the next listing, and of any rank.
    if classes is None:
        return tuple(sorted(found, key=int if by_number and all(map(_is_number, found)) else None))
    names = check_names(classes)
    unknown = sorted(found - set(names))
    if unknown:
        raise DataError(
            f"there are images of {_some(unknown)}, which classes={list(names)!r} does not hold",
            "unknown class",
        )
    return names


def _by_folder(paths: Sequence[str], url_of: UrlOf, is_clear: bool) -> list[str | None]:
    """The name of the folder that each file lies in."""
    odd = next((place for place, path in enumerate(paths) if _NO_SLASH.search(path)), None)
    if odd is not None:
        raise DataError(
            f"{url_of(odd)} has backslashes or %2F in its name, where slashes may be meant, so no "
            f"folder says what it is; upload it again with slashes, or pass {_FUNCTION}",
            "slashes",
            url=url_of(odd),
        )
    folders = [path.rpartition("/")[0] for path in paths]
    first = {folder: place for place, folder in reversed([*enumerate(folders)])}
    name = {folder: posixpath.basename(folder or _above(url_of, first[""])) for folder in first}
    two = () if is_clear else _two_readings(name)
    if two:
        said = (f"{url_of(first[folder])} is of the class {name[folder]!r}" for folder in two)
        warn(
            f"The folders can be read in several ways; here {' and '.join(said)}: the folder that "
            f"an image lies in names its class. If another one is meant, pass {_FUNCTION}; if "
            "not, classes=."
        )
    # A file at the top has the name of the datastore itself, or of its tar, as its folder.
    return [
        name[folder] if folder else posixpath.basename(_above(url_of, place))
        for place, folder in enumerate(folders)
    ]


def _above(url_of: UrlOf, place: int) -> str:
    return posixpath.dirname(url_of(place))


def _two_readings(name: Mapping[str, str]) -> tuple[str, ...]:
    """Two folders of images whose places differ, so that another folder may be meant; or none.

    >>> _two_readings({"train/cat": "cat", "train/dog": "dog"})
    ()
    >>> _two_readings({"a/day1": "day1", "a/day2": "day2", "b/day1": "day1"})
    ('a/day1', 'b/day1')
    """
    folders = sorted(name)
    # The folder of files at the top lies in nothing.
    above = {folder: folder and "/" + folder.rpartition("/")[0] for folder in folders}
    if len(set(above.values())) < 2:
        return ()
    one: dict[str, str] = {}
    for folder in folders:
        if name[folder] in one:
            return one[name[folder]], folder
        one[name[folder]] = folder
    return folders[0], next(f for f in folders if above[f] != above[folders[0]])


def _is_number(text: str) -> bool:
    # "007" stays a text: it would come back as "7". `int` of a very long text takes long.
    return len(text) < 20 and text.isascii() and text.isdigit() and str(int(text)) == text


def _one(label: object, url: str) -> str | None:
    if label is None or isinstance(label, str):
        return label
    raise OptionsError(f"labels= gave {label!r} for {url}; it must give a str, or None")


def _look_up(
    rows: Iterable[tuple[Any, Any]], paths: Sequence[str], url_of: UrlOf
) -> list[str | None]:
    """The label that a table has for each file: by its path, with or without extension, or URL."""
    label_of: dict[str, str] = {}
    for path, label in rows:
        text = _text(label, path)
        # The same row twice does no harm; two labels for one file are a mistake in the table.
        known = label_of.setdefault(str(path), text)
        if known != text:
            raise DataError(
                f"labels= has two labels for {path}: {known!r} and {text!r}", "two labels"
            )
    found: list[str | None] = []
    unused = dict.fromkeys(label_of)
    for place, path in enumerate(paths):
        # The exact path comes before the one without an extension: "a.jpg" and "a" may be two rows.
        names = (path, url_of(place), posixpath.splitext(path)[0])
        key = next((name for name in names if name in label_of), None)
        found.append(None if key is None else label_of[key])
        if key is not None:
            unused.pop(key, None)
    if unused:
        raise DataError(
            f"labels= has {len(unused):,} of {len(label_of):,} rows without an image: "
            f"{_some([*unused])}; there is {url_of(0)}, for example",
            "no image",
        )
    return found


def _text(label: object, path: object) -> str:
    """A label as text; integers of numpy and pandas give their digits."""
    if isinstance(label, str):
        return label
    # `__index__` is what integers of all libraries have, and floats do not.
    if hasattr(label, "__index__") and not isinstance(label, bool):
        return str(label.__index__())
    raise OptionsError(
        f"labels= has {label!r} for {plain(str(path))}; a label must be a text or an integer"
    )


def _rows(frame: Any) -> Iterable[tuple[Any, Any]]:
    """Path and label of each row of a data frame of any library."""
    columns = {str(column): column for column in frame.columns}
    path, label = "path", "label"
    if not {path, label} <= set(columns) and len(columns) == 2:
        path, label = columns
    if not {path, label} <= set(columns):
        raise OptionsError(
            f"the table of labels has the columns {plain(', '.join(columns))}; "
            'name those of path and label so: labels.rename(columns={"file": "path"})'
        )
    return zip(frame[columns[path]], frame[columns[label]], strict=True)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
