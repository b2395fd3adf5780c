"""Which label a file has, by its folder or a function; and how a data set is split by labels. Runs
anywhere; no torch."""

from __future__ import annotations

import posixpath
import re
import reprlib
import sys
import warnings
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpupool.core.errors import DataError, OptionsError
from gpupool.core.options.datasets import NO_CLASS
from gpupool.core.terminal import without_controls
from gpupool.data.reading.shards import Indices, keyed_generator

# What Windows and careless programs write for a slash.
_NO_SLASH = re.compile(r"\\|%2f|%5c", re.IGNORECASE)

Labels = Literal["foldernames"] | str | Callable[[str], str | int | None] | None
UrlOf = Callable[[int], str]


def labelled(
    paths: Sequence[str], url_of: UrlOf, labels: Labels, known: Sequence[str | None] = ()
) -> tuple[Indices, Indices, tuple[str, ...]]:
    """Which files have a label, their labels as indices, and the names of the classes.

    Classes are sorted as texts, as torchvision's ImageFolder does, whose networks exist; those that
    are no folders, and all whole numbers, so that "10" follows "9".

    `paths` lie below the URL of the datastore. `known` has the label of each, where `labels` need
    not be asked. Raises OptionsError for what is no label, DataError for names that are no class.
    """
    if labels is None:
        return np.arange(len(paths)), np.full(len(paths), NO_CLASS), ()
    # A data frame, which nobody takes, compares element by element.
    are_folders = isinstance(labels, str) and labels == "foldernames"
    given = known
    if not given and are_folders:
        given = _by_folder(paths, url_of)
    elif not given and callable(labels):
        given = [_text(labels(url), url) for url in map(url_of, range(len(paths)))]
    elif not given:
        raise OptionsError(
            f'labels={reprlib.repr(labels)} must be "foldernames", a function of the URL of an '
            'image, or None; of a table: labels=lambda url: table[url.rpartition("/")[2]]'
        )
    # Names are printed in tables, plots and errors.
    found = {label for label in given if label is not None}
    odd = [label for label in found if not label or without_controls(label) != label]
    if odd or not found:
        raise DataError(
            f"labels= gave {odd[0] if odd else None!r} for an image, or all, as {url_of(0)}; "
            "a class is named in one line of text",
            "no labels",
        )
    # Sorted, as a set has no order: the indices must be those of the next listing, and of any rank.
    are_numbers = not are_folders and all(map(_is_number, found))
    names = tuple(sorted(found, key=int if are_numbers else None))
    index_of: dict[str | None, int] = {name: index for index, name in enumerate(names)}
    kept = [place for place, label in enumerate(given) if label is not None]
    return np.array(kept), np.array([index_of[given[place]] for place in kept]), names


def among(classes: Sequence[str], indices: Indices, names: Sequence[str]) -> Indices:
    """Labels as indices into `classes` in the place of `names`; -100 stays."""
    place = {name: index for index, name in enumerate(classes)}
    if len(place) != len(classes) or not all(isinstance(name, str) for name in classes):
        raise OptionsError(f"classes={list(classes)!r} must be names, each once")
    # Those without a class find the last one.
    places = np.array([*(place.get(name, NO_CLASS) for name in names), NO_CLASS])
    changed: Indices = places[np.maximum(indices, -1)]
    lacking = np.unique(indices[(changed < 0) & (indices >= 0)])
    if len(lacking):
        unknown = ", ".join(names[index] for index in lacking)
        raise OptionsError(f"there are images of {unknown}, which classes={classes!r} lacks")
    return changed


def split(
    labels: NDArray[Any], classes: Sequence[str], sizes: Sequence[float], seed: int | None
) -> list[Indices]:
    """As `Datastore.split_each_label`: the indices of each part, sorted."""
    shown = f"split_each_label({', '.join(map(repr, sizes))})"
    kinds = {isinstance(size, Integral) and not isinstance(size, bool) for size in sizes}
    # Fractions that add up to 1 may come to slightly more as floats.
    fractions_fit = all(0 < size < 1 for size in sizes) and sum(sizes) < 1 + 1e-9
    if len(kinds) != 1 or not (min(sizes) >= 1 if True in kinds else fractions_fit):
        raise OptionsError(
            f"{shown}: give fractions between 0 and 1 that add up to at most 1, or whole numbers "
            "of images per label"
        )
    if not len(classes):
        raise OptionsError("these images have no labels; use subset")
    pieces = []
    for index, name in enumerate(classes):
        own = np.flatnonzero(labels == index)
        if seed is not None:
            # A key for each class: how one is drawn does not depend on the others.
            own = keyed_generator(seed, index).permutation(own)
        cuts = np.cumsum(sizes)
        if False in kinds:
            # The small term makes 0.1 + 0.2 of 10 images three of them, whatever floats add up to.
            cuts = np.minimum(len(own), cuts * len(own) + 0.5 + 1e-9).astype(int)
        elif sum(sizes) > len(own):
            raise OptionsError(
                f"{shown} asks for {sum(sizes)} images per label, but {name!r} has {len(own)}"
            )
        pieces.append(np.split(own, cuts))
    parts = [np.sort(np.concatenate(part)) for part in zip(*pieces, strict=True)]
    if not len(parts[-1]):  # nothing is left for the rest
        parts.pop()
    if len(parts) < 2 or not all(map(len, parts)):
        raise OptionsError(f"{shown} of {len(labels):,} images leaves a part empty")
    return parts


def warn(message: str) -> None:
    """A warning at the line of the user's that makes the datastore."""
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("gpupool."):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, stacklevel=depth)


def _by_folder(paths: Sequence[str], url_of: UrlOf) -> list[str]:
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
    if len(examples) > 1:
        one, other, *_ = (f"{url_of(n)} is of the class {names[n]!r}" for n in examples.values())
        warn(
            f"The folders can be read in several ways; here {one} and {other}: the folder that an "
            "image lies in names its class. Say what is meant by a function from an image's URL to "
            'its label, as labels=lambda url: url.split("/")[-2].'
        )
    return names


def _text(label: object, url: str) -> str | None:
    """A label as text; integers of numpy and pandas give their digits, None stays."""
    # `__index__` is what integers of all libraries have, and floats do not.
    if hasattr(label, "__index__") and not isinstance(label, bool):
        return str(label.__index__())
    if label is None or isinstance(label, str):
        return label
    raise OptionsError(f"labels= has {label!r} for {url}; a label must be a text or an integer")


def _is_number(text: str) -> bool:
    # "007" stays a text: it would come back as "7". `int` of a very long text takes long.
    return len(text) < 20 and text.isascii() and text.isdigit() and str(int(text)) == text
