"""Which label a file has: by its folder, a function, or a table. Runs anywhere; no torch."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from gpupool.core.errors import DataError, OptionsError
from gpupool.core.terminal import plain, without_controls

Labels = Literal["foldernames"] | str | Callable[[str], str | None] | Mapping[str, Any] | Any

_WHAT = (
    'labels={!r} must be "foldernames", a function of the URL, a mapping of paths to labels, '
    "or a data frame, as pandas.read_csv gives"
)


def label_files(
    paths: Sequence[str],
    url_of: Callable[[int], str],
    labels: Labels,
) -> list[str | None]:
    """The label of each file, None for those to leave out.

    Args:
        paths: of the files, below the URL of their datastore.
        url_of: gives the URL of the file at a place in `paths`.
        labels: "foldernames"; a function of the URL; or a table: a mapping of paths to labels, or
            a data frame with the columns "path" and "label", or any two. Its paths are those below
            the datastore's URL, or whole URLs, and may lack the extension. Files without a row are
            left out; each row must have a file.

    Raises OptionsError for what is no label, DataError for a table that does not fit the files.
    """
    if isinstance(labels, str) and labels == "foldernames":
        # A file at the top has the name of the datastore itself as its folder.
        return [_folder(path if "/" in path else url_of(i)) for i, path in enumerate(paths)]
    if isinstance(labels, Mapping):
        return _look_up(labels.items(), paths, url_of)
    # Before callables: neither library is imported, so an attribute has to show what it is.
    if hasattr(labels, "columns"):  # of pandas, polars ... ; a class is no data frame
        frame: Any = labels
        table = {str(column): list(frame[column]) for column in frame.columns}
        return _look_up(_rows(table), paths, url_of)
    if callable(labels):
        return [_one(labels(url), url) for url in map(url_of, range(len(paths)))]
    raise OptionsError(_WHAT.format(labels))


def class_names(
    labels: Iterable[str | None], wanted: Sequence[str] | None, by_number: bool
) -> tuple[str, ...]:
    """The names of the classes in the order of their indices.

    `wanted`, where given, must hold every label. Else they are sorted as texts, as torchvision's
    ImageFolder does; or, with `by_number` and if all are whole numbers, so that "10" follows "9".
    """
    found = {label for label in labels if label is not None}
    # Names are printed in tables, plots and errors.
    odd = next((label for label in found if without_controls(label) != label), None)
    if odd is not None:
        raise DataError(
            f"there are images of {odd!r}; a class is named in one line of text", "class name"
        )
    # Sorted, as a set has no order: the indices must be those of the next listing, and of any rank.
    if wanted is None:
        return tuple(sorted(found, key=int if by_number and all(map(_is_number, found)) else None))
    names = tuple(wanted)
    if len(set(names)) != len(names) or not all(isinstance(name, str) for name in names):
        raise OptionsError(f"classes={list(names)!r} must be names, each once")
    unknown = sorted(found - set(names))
    if unknown:
        raise DataError(
            f"there are images of {_some(unknown)}, which classes={list(names)!r} does not hold",
            "unknown class",
        )
    return names


def _folder(path: str) -> str:
    return posixpath.basename(posixpath.dirname(path))


def _is_number(text: str) -> bool:
    # "007" stays a text: it would come back as "7". `int` of a very long text takes long.
    return len(text) < 20 and text.isascii() and text.isdigit() and str(int(text)) == text


def _one(label: object, url: str) -> str | None:
    if label is None or isinstance(label, str):
        return label
    raise OptionsError(f"labels= gave {label!r} for {url}; it must give a str, or None")


def _look_up(
    rows: Iterable[tuple[Any, Any]], paths: Sequence[str], url_of: Callable[[int], str]
) -> list[str | None]:
    label_of: dict[str, str] = {}
    for path, label in rows:
        # The same row twice does no harm; two labels for one file are a mistake in the table.
        known, text = label_of.setdefault(str(path), _text(label, path)), _text(label, path)
        if known != text:
            raise DataError(
                f"labels= has two labels for {path}: {known!r} and {text!r}", "two labels"
            )
    keys = [_key(path, url_of(place), label_of) for place, path in enumerate(paths)]
    used = set(keys)
    missing = [path for path in label_of if path not in used]
    if missing:
        raise DataError(
            f"labels= has {len(missing):,} of {len(label_of):,} rows without an image: "
            f"{_some(missing)}; there is {url_of(0)}, for example",
            "no image",
        )
    return [None if key is None else label_of[key] for key in keys]


def _key(path: str, url: str, label_of: Mapping[str, str]) -> str | None:
    """The name by which the table has a file; None if it has none."""
    # The exact path comes before the one without an extension: "a.jpg" and "a" may be two rows.
    names = (path, url, posixpath.splitext(path)[0])
    return next((name for name in names if name in label_of), None)


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


def _rows(table: Mapping[str, list[Any]]) -> Iterable[tuple[Any, Any]]:
    path, label = "path", "label"
    if not {path, label} <= set(table) and len(table) == 2:
        path, label = table
    if not {path, label} <= set(table):
        raise OptionsError(
            f"the table of labels has the columns {plain(', '.join(table))}; "
            'name those of path and label so: labels.rename(columns={"file": "path"})'
        )
    return zip(table[path], table[label], strict=True)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
