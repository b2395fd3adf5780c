"""Which label a file has: by its folder, a function, or a table. Runs anywhere; no torch."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpupool.core.errors import DataError, OptionsError
from gpupool.core.options.datasets import NO_CLASS
from gpupool.core.terminal import plain, without_controls
from gpupool.data.datastores.told import warn
from gpupool.data.reading.shards import Indices

Labels = Literal["foldernames"] | str | Callable[[str], str | None] | Mapping[str, Any] | Any
UrlOf = Callable[[int], str]
# What Windows and careless programs write for a slash.
_NO_SLASH = re.compile(r"\\|%2f|%5c", re.IGNORECASE)

_FUNCTION = "labels= a function from an image's URL to its label"


def labelled(
    paths: Sequence[str], url_of: UrlOf, labels: Labels, classes: Sequence[str] | None
) -> tuple[Indices, NDArray[np.int32], tuple[str, ...]]:
    """The places of the files that have a label, their indices, and the names of the classes.

    Classes that are not given are sorted as texts, as torchvision's ImageFolder does, whose
    networks exist; those that are no folders, and all whole numbers, so that "10" follows "9".

    Args:
        paths: of the files, below the URL of their datastore.
        url_of: gives the URL of the file at a place in `paths`.
        labels: as of `ImageDatastore`; a function is asked in the order of `paths`.
        classes: the names that must hold every label, if they are given.

    Raises OptionsError for what is no label, or not one of `classes`, DataError for names or a
    table that do not fit.
    """
    if labels is None:
        return np.arange(len(paths)), np.full(len(paths), NO_CLASS, np.int32), ()
    given = _given(paths, url_of, labels, classes)
    found = {label for label in given if label is not None}
    if not found:
        what = f"labels= gave None for all {len(paths):,} images, as {url_of(0)}"
        raise DataError(what, "no labels")
    # Names are printed in tables, plots and errors.
    odd = next((label for label in found if not label or without_controls(label) != label), None)
    if odd is not None:
        raise DataError(
            f"there are images of {odd!r}; a class is named in one line of text", "class name"
        )
    # Sorted, as a set has no order: the indices must be those of the next listing, and of any rank.
    are_numbers = not _are_folders(labels) and all(map(_is_number, found))
    names = tuple(sorted(found, key=int if are_numbers else None))
    index_of: dict[str | None, int] = {name: index for index, name in enumerate(names)}
    kept = [place for place, label in enumerate(given) if label is not None]
    indices = np.array([index_of[given[place]] for place in kept], np.int32)
    if classes is not None:
        indices, names = among(classes, indices, names), tuple(classes)
    return np.array(kept), indices, names


def _given(
    paths: Sequence[str], url_of: UrlOf, labels: Labels, classes: Sequence[str] | None
) -> list[str | None]:
    """The label of each file, None for those to leave out."""
    if _are_folders(labels):
        return _by_folder(paths, url_of, is_clear=classes is not None)
    if isinstance(labels, Mapping):
        return _by_table(labels.items(), paths, url_of)
    # Before callables: no library is imported, so an attribute has to show what it is.
    if hasattr(labels, "columns"):
        frame: Any = labels
        columns = list(map(str, frame.columns))
        if not {"path", "label"} <= set(columns):
            raise OptionsError(
                f"the table of labels has the columns {plain(', '.join(columns))}; "
                'name those of path and label so: labels.rename(columns={"file": "path"})'
            )
        return _by_table(zip(frame["path"], frame["label"], strict=True), paths, url_of)
    if callable(labels):
        urls = map(url_of, range(len(paths)))
        made = ((url, labels(url)) for url in urls)
        return [None if label is None else _text(label, url) for url, label in made]
    raise OptionsError(
        f'labels={labels!r} must be "foldernames", a function of the URL, a mapping of paths to '
        "labels, or a data frame, as pandas.read_csv gives"
    )


def _are_folders(labels: Labels) -> bool:
    # A data frame compares element by element, and has no truth.
    return isinstance(labels, str) and labels == "foldernames"


def among(
    classes: Sequence[str], indices: NDArray[np.int32], names: Sequence[str]
) -> NDArray[np.int32]:
    """Labels as indices into `classes` in the place of `names`; -100 stays.

    Raises OptionsError if `classes` lack a name that an image has, or are no names.
    """
    place = {name: index for index, name in enumerate(classes)}
    if len(place) != len(classes) or not all(isinstance(name, str) for name in classes):
        raise OptionsError(f"classes={list(classes)!r} must be names, each once")
    # Those without a class find the last one.
    places = np.array([*(place.get(name, NO_CLASS) for name in names), NO_CLASS], np.int32)
    changed: NDArray[np.int32] = places[np.maximum(indices, -1)]
    lacking = np.unique(indices[(changed < 0) & (indices >= 0)])
    if len(lacking):
        unknown = ", ".join(names[index] for index in lacking)
        raise OptionsError(f"there are images of {unknown}, which classes={classes!r} lacks")
    return changed


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
    folders = list(map(posixpath.dirname, paths))

    def named(place: int) -> str:
        # A file at the top has the name of the datastore itself, or of its tar, as its folder.
        return posixpath.basename(folders[place] or posixpath.dirname(url_of(place)))

    places = {folder: place for place, folder in reversed([*enumerate(folders)])}
    one, *others = sorted(places)
    other = next((folder for folder in others if _above(folder) != _above(one)), None)
    if other is not None and not is_clear:
        two = (f"{url_of(at)} is of the class {named(at)!r}" for at in (places[one], places[other]))
        warn(
            f"The folders can be read in several ways; here {' and '.join(two)}: the folder that "
            f"an image lies in names its class. If another one is meant, pass {_FUNCTION}; if "
            "not, classes=."
        )
    return list(map(named, range(len(paths))))


def _above(folder: str) -> str:
    # The folder of files at the top lies in nothing.
    return folder and "/" + posixpath.dirname(folder)


def _by_table(
    rows: Iterable[tuple[Any, Any]], paths: Sequence[str], url_of: UrlOf
) -> list[str | None]:
    """The label that a table has for each file: by its path, with or without extension, or URL."""
    label_of: dict[str, str] = {}
    for path, label in rows:
        text = _text(label, plain(str(path)))
        # The same row twice does no harm; two labels for one file are a mistake in the table.
        if label_of.setdefault(str(path), text) != text:
            raise DataError(
                f"labels= has two labels for {path}: {label_of[str(path)]!r} and {text!r}",
                "two labels",
            )

    def key_of(place: int) -> str | None:
        # The exact path comes before the one without an extension: "a.jpg" and "a" may be two rows.
        names = (paths[place], url_of(place), posixpath.splitext(paths[place])[0])
        return next((name for name in names if name in label_of), None)

    keys = list(map(key_of, range(len(paths))))
    unused = sorted(label_of.keys() - set(keys))
    if unused:
        raise DataError(
            f"labels= has {len(unused):,} of {len(label_of):,} rows without an image, as "
            f"{', '.join(unused[:3])}; there is {url_of(0)}, for example",
            "no image",
        )
    return [None if key is None else label_of[key] for key in keys]


def _text(label: object, name: str) -> str:
    """A label as text; integers of numpy and pandas give their digits."""
    # `__index__` is what integers of all libraries have, and floats do not.
    if hasattr(label, "__index__") and not isinstance(label, bool):
        return str(label.__index__())
    if isinstance(label, str):
        return label
    raise OptionsError(f"labels= has {label!r} for {name}; a label must be a text or an integer")


def _is_number(text: str) -> bool:
    # "007" stays a text: it would come back as "7". `int` of a very long text takes long.
    return len(text) < 20 and text.isascii() and text.isdigit() and str(int(text)) == text
