"""Which label a file has: by its folder, a function, or a table. Runs anywhere; no torch."""

from __future__ import annotations

import posixpath
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpupool.core.errors import DataError, OptionsError
from gpupool.core.options.datasets import NO_CLASS
from gpupool.core.terminal import plain, without_controls
from gpupool.data.reading.shards import Indices

# What Windows and careless programs write for a slash.
_NO_SLASH = re.compile(r"\\|%2f|%5c", re.IGNORECASE)

Labels = Literal["foldernames"] | str | Callable[[str], str | None] | Mapping[str, Any] | Any
UrlOf = Callable[[int], str]


def labelled(
    paths: Sequence[str],
    url_of: UrlOf,
    labels: Labels,
    classes: Sequence[str] | None,
    known: Sequence[str] | None = None,
) -> tuple[Indices, NDArray[np.int32], tuple[str, ...]]:
    """The places of the files that have a label, their indices, and the names of the classes.

    Classes that are not given are sorted as texts, as torchvision's ImageFolder does, whose
    networks exist; those that are no folders, and all whole numbers, so that "10" follows "9".

    Args:
        paths: of the files, below the URL of their datastore.
        url_of: gives the URL of the file at a place in `paths`.
        labels: as of `ImageDatastore`.
        classes: the names that must hold every label, if they are given.
        known: the label of each file, where that need not be found out.

    Raises OptionsError for what is no label, or not one of `classes`, DataError for names or a
    table that do not fit.
    """
    if labels is None:
        return np.arange(len(paths)), np.full(len(paths), NO_CLASS, np.int32), ()
    # A data frame compares element by element, and has no truth.
    are_folders = isinstance(labels, str) and labels == "foldernames"
    given: Sequence[str | None] = known or ()
    if not given and are_folders:
        given = _by_folder(paths, url_of, is_clear=classes is not None)
    elif not given:
        given = _chosen(paths, url_of, labels)
    # Names are printed in tables, plots and errors.
    found = {label for label in given if label is not None}
    odd = [label for label in found if not label or without_controls(label) != label]
    if odd or not found:
        raise DataError(
            f"labels= gave {odd[0] if odd else None!r} for an image, or all, as {url_of(0)}; a "
            "class is named in one line of text",
            "no labels",
        )
    # Sorted, as a set has no order: the indices must be those of the next listing, and of any rank.
    are_numbers = not are_folders and all(map(_is_number, found))
    names = tuple(sorted(found, key=int if are_numbers else None))
    index_of: dict[str | None, int] = {name: index for index, name in enumerate(names)}
    kept = [place for place, label in enumerate(given) if label is not None]
    indices = np.array([index_of[given[place]] for place in kept], np.int32)
    if classes is not None:
        indices, names = among(classes, indices, names), tuple(classes)
    return np.array(kept), indices, names


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


def warn(message: str) -> None:
    """A warning at the line of the user's that makes the datastore."""
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("gpupool."):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, stacklevel=depth)


def _by_folder(paths: Sequence[str], url_of: UrlOf, is_clear: bool) -> list[str]:
    """The name of the folder that each file lies in."""
    odd = next((place for place, path in enumerate(paths) if _NO_SLASH.search(path)), None)
    if odd is not None:
        raise DataError(
            f"{url_of(odd)} has backslashes or %2F in its name, where slashes may be meant, so no "
            "folder says what it is; upload it again with slashes, or pass labels= a function from "
            "an image's URL to its label",
            "slashes",
            url=url_of(odd),
        )
    # A file at the top has the name of the datastore itself, or of its tar, as its folder.
    folders = [posixpath.dirname(path) for path in paths]
    names = [
        posixpath.basename(folder or posixpath.dirname(url_of(place)))
        for place, folder in enumerate(folders)
    ]
    # One of those that lie in each folder; those at the top lie in none.
    examples = {folder and f"/{posixpath.dirname(folder)}": n for n, folder in enumerate(folders)}
    if len(examples) > 1 and not is_clear:
        one, other, *_ = (f"{url_of(n)} is of the class {names[n]!r}" for n in examples.values())
        warn(
            f"The folders can be read in several ways; here {one} and {other}: the folder that an "
            "image lies in names its class. If another one is meant, pass labels= a function from "
            "an image's URL to its label; if not, classes=."
        )
    return names


def _chosen(paths: Sequence[str], url_of: UrlOf, labels: Any) -> list[str | None]:
    """The label of each file by a table or function, None for those to leave out."""
    rows: Any = labels.items() if isinstance(labels, Mapping) else None
    # Before callables: no library is imported, so an attribute has to show what it is.
    if {"path", "label"} <= set(getattr(labels, "columns", ())):
        rows = zip(labels["path"], labels["label"], strict=True)
    urls = map(url_of, range(len(paths)))
    if rows is None and callable(labels):
        made = ((url, labels(url)) for url in urls)
        return [None if label is None else _text(label, url) for url, label in made]
    if rows is None:
        raise OptionsError(
            f'labels={labels!r} must be "foldernames", a function of the URL, a mapping of paths '
            'to labels, or a data frame with the columns "path" and "label"'
        )
    label_of: dict[str, str] = {}
    for path, label in rows:
        text = _text(label, plain(str(path)))
        if label_of.setdefault(str(path), text) != text:
            raise DataError(f"labels= has two labels for {path}, one of them {text!r}", "no image")
    # The exact path comes before the one without an extension: "a.jpg" and "a" may be two rows.
    named = [
        (path, url, posixpath.splitext(path)[0]) for path, url in zip(paths, urls, strict=True)
    ]
    keys = [next((name for name in names if name in label_of), None) for names in named]
    if unused := sorted(label_of.keys() - set(keys)):
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
