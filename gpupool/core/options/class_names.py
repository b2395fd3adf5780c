"""The classes of data sets, by name: the same index means the same class everywhere. Runs anywhere.

Knows data sets by what they have, and imports none of their libraries.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from gpupool.core.errors import TrainingError
from gpupool.core.options.datasets import LABELS, labels_of, parts_of

NO_CLASS = -100  # of torch's cross_entropy
_SHOWN = 5


def class_names(dataset: Any) -> tuple[str, ...]:
    """The names of the classes by index, of a data set or what it is a part of; () if unknown.

    Of several data sets one after the other: those of the one that knows all others'.

    Raises TrainingError, naming the classes, if none of these does.
    """
    parts = parts_of(dataset)
    if not parts:
        return _own_names(dataset)
    named = [names for part in parts if (names := class_names(part))]
    if not named:
        return ()
    most = max(named, key=len)
    for names in named:
        beyond = [name for name in names if name not in most]
        if beyond:
            raise TrainingError(
                f"the parts of the {type(dataset).__name__} have other classes: one knows "
                f"{_some(most)}, another has {_some(beyond)}; make each know all of them, as "
                "one.concat(another) of datastores does."
            )
    return most


def bound(dataset: Any, names: Sequence[str], what: str, whose: str) -> Any:
    """The data set with indices of its classes into `names`; as it is where it has no names.

    Args:
        what: the data set, for errors.
        whose: those who know `names`.

    Raises:
        TrainingError: it has samples of a class that is not in `names`; says which.
    """
    if not names:
        return dataset
    if parts := parts_of(dataset):
        changed = [bound(part, names, what, whose) for part in parts]
        if all(new is old for new, old in zip(changed, parts, strict=True)):
            return dataset
        dataset = copy.copy(dataset)
        if hasattr(dataset, "datasets"):
            dataset.datasets = changed
        else:
            (dataset.dataset,) = changed
        return dataset
    own = _own_names(dataset)
    if not own or own == tuple(names):
        return dataset
    used = _used(dataset, own)
    unknown = [name for name in used if name not in names]
    if unknown:
        raise TrainingError(
            f"{what} has the class{'es' if len(unknown) > 1 else ''} {_some(unknown)}, which "
            f"{whose} not know: the classes are {_some(names)}. Leave its samples out, or train "
            "with them."
        )
    if hasattr(dataset, "with_classes"):
        return dataset.with_classes(names)
    if [own.index(name) for name in used] != [names.index(name) for name in used]:
        raise TrainingError(
            f"{what} counts its classes in another order ({_some(own)}) than {_some(names)}; give "
            "it that order."
        )
    return dataset


def _own_names(dataset: Any) -> tuple[str, ...]:
    """Names by index; () where a target may mean something else."""
    if getattr(dataset, "target_transform", None) is not None:
        return ()
    names = getattr(dataset, "classes", None)
    features = getattr(dataset, "features", None)
    if names is None and isinstance(features, Mapping):
        labels = [features[name] for name in LABELS if name in features]
        names = getattr(labels[0], "names", None) if len(labels) == 1 else None
    if not isinstance(names, (list, tuple)):
        return ()
    # torchvision's ImageNet has several words for each class.
    words = tuple(", ".join(map(str, n)) if isinstance(n, tuple) else n for n in names)
    is_named = all(isinstance(word, str) for word in words) and len(set(words)) == len(words)
    return words if is_named else ()


def _used(dataset: Any, names: Sequence[str]) -> list[str]:
    """The classes that there are samples of, as far as no sample has to be read for it."""
    labels = labels_of(dataset)
    found = range(len(names)) if labels is None else set(labels.tolist())
    return [name for index, name in enumerate(names) if index in found]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
