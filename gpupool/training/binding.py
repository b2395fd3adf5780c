"""What a data set and a network know of each other: classes by name, normalization, numbers.

Runs on the client, before anything is sent.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpupool.core.errors import OptionsError, TrainingError
from gpupool.core.network import NetworkInfo, Scaling, in_words, info_of
from gpupool.core.options.class_names import NO_CLASS, bound, class_names
from gpupool.core.options.datasets import labels_of

_CLASS_LOSSES = ("cross_entropy", "nll")
_CLASS_MODULES = ("CrossEntropyLoss", "NLLLoss")
_FRAMES = {
    "predict": 6,
    "evaluate": 4,
    "confusion": 4,
    "worst": 6,
}  # from here to who has called it


@dataclass(frozen=True)
class Bound:
    """Data sets whose classes have the same indices, and what their network knows then.

    `num_classes`: so many outputs the network needs at least; 0 where nobody knows.
    """

    dataset: Any
    validation: Any
    network: NetworkInfo
    num_classes: int


def bind_training(
    model: object, dataset: Any, validation: Any, loss: Any, *, fits_normalization: bool
) -> Bound:
    """Match the classes of all three by name.

    Raises:
        TrainingError: one has classes that the others do not know, or a normalization of its own.
    """
    known = info_of(model)
    names = known.classes or class_names(dataset)
    whose = "the network does" if known.classes else "the training data do"
    try:
        dataset = bound(dataset, names, "dataset", whose)
    except TrainingError as error:
        if not known.classes:
            raise
        raise TrainingError(
            f"{error} For other classes give the network other outputs: "
            f"gpupool.replace_head(model, {len(class_names(dataset))})."
        ) from None
    scaling = None if fits_normalization else scaling_of(dataset) or known.normalization
    if validation is not None:
        validation = bound(validation, names, "validation", whose)
        own = scaling_of(validation)
        if own is not None and not fits_normalization and own != scaling:
            raise _other_scaling("validation", own, "the training data", scaling)
    labels = labels_of(dataset)
    if labels is not None and len(labels) and labels.max() == labels.min() == NO_CLASS:
        raise TrainingError(
            "the images of dataset have no labels, and training needs them: see labels= of "
            "gpupool.ImageDatastore."
        )
    sets = [dataset] if validation is None else [dataset, validation]
    num_classes = max(num_outputs(one, loss) for one in sets)
    is_raw = scaling_of(dataset) is None and (fits_normalization or scaling is not None)
    return Bound(dataset, validation, NetworkInfo(names, scaling, from_raw=is_raw), num_classes)


def bind(model: object, dataset: Any, what: str) -> Any:
    """The data set as the network counts its classes; what they do not name is left as it is.

    Raises:
        TrainingError: it has classes that the network does not know, or another normalization.
    """
    known = info_of(model)
    names = class_names(dataset)
    # Pictures below one folder that is no class are new ones, to be predicted.
    is_new = what == "predict" and len(names) == 1 and not set(names) & set(known.classes)
    if not is_new:
        dataset = bound(dataset, known.classes, "dataset", "the network does")
    own, ours = scaling_of(dataset), known.normalization
    if ours is not None and own is not None and own != ours:
        raise _other_scaling("dataset", own, "the network", ours)
    # Tensors and new pictures are raw, and so are data like those of a training on raw ones;
    # other data sets with classes may be normalized in their own way.
    if ours is not None and own is None and names and not known.from_raw:
        warnings.warn(
            f"{what}: the data set has no normalization; that of the network's training is applied "
            f"({in_words(ours)}). Its own transform must not normalize as well.",
            stacklevel=_FRAMES[what],
        )
    is_other = bool(known.classes) and names != known.classes[: len(names)]
    if what == "predict" and is_other and not is_new:
        warnings.warn(
            "predict: the columns of the outputs are the network's classes, which the data set "
            "counts in another order; compare names (names=True), or its labels after "
            "with_classes(result.classes).",
            stacklevel=_FRAMES[what],
        )
    return dataset


def scaling_of(dataset: Any) -> Scaling | None:
    """The normalization that a data set asks for, or what it is a part of; None without one."""
    found = getattr(dataset, "normalization", None)
    if found is not None:
        mean, std = found
        return tuple(map(float, mean)), tuple(map(float, std))
    parts = getattr(dataset, "datasets", None)
    if parts is None and hasattr(dataset, "indices"):
        parts = [dataset.dataset] if hasattr(dataset, "dataset") else None
    # As on the ranks: only parts that are read in two steps are normalized within a wrapper.
    asked = {scaling_of(part) for part in parts or ()}
    return asked.pop() if len(asked) == 1 else None


def _other_scaling(what: str, own: Scaling, whose: str, ours: Scaling | None) -> OptionsError:
    there = "has none" if ours is None else f"has {in_words(ours)}"
    return OptionsError(
        f"{what} has a normalization of its own ({in_words(own)}), and {whose} {there}: give both "
        "the same by with_normalization."
    )


def _ignored(loss: Any) -> int | None:
    """The class that means none to a loss over classes; None of another loss."""
    if isinstance(loss, str):
        return NO_CLASS if loss in _CLASS_LOSSES else None
    name = type(loss).__name__
    return int(loss.ignore_index) if name in _CLASS_MODULES else None


def num_outputs(dataset: Any, loss: Any) -> int:
    """How many outputs a loss over classes needs, as far as no sample has to be read for it.

    0 for another loss, and where only the samples show it.
    """
    ignored = _ignored(loss)
    if ignored is None:
        return 0
    labels = labels_of(dataset)
    highest = -1 if labels is None else _highest(labels, ignored)
    return max(len(class_names(dataset)), highest + 1)


def _highest(labels: Any, ignored: int) -> int:
    import numpy as np

    there: Sequence[int] = [n for n in np.unique(labels).tolist() if n not in (ignored, NO_CLASS)]
    wrong = [number for number in there if number < 0]
    if wrong:
        raise TrainingError(
            f"the targets have class {wrong[0]}: classes are counted from 0, and {ignored} means "
            "none."
        )
    return max(there, default=-1)
