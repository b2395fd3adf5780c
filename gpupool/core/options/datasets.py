"""Data sets: which can be trained on, their labels and classes, and how often a sample comes.

Knows data sets by what they have, and imports none of their libraries. Runs anywhere; no torch.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gpupool.core.errors import OptionsError, TrainingError
from gpupool.core.formatting import shortened
from gpupool.core.options.training_options import TrainingOptions

NO_CLASS = -100  # of torch's cross_entropy
LABELS = ("label", "labels", "target", "targets")  # what data sets and their columns call them


def is_stream(dataset: Any) -> bool:
    """Whether it is only walked through: an IterableDataset, as torch's or Hugging Face's.

    >>> is_stream([1, 2]), is_stream({1, 2})
    (False, True)
    """
    if _is_a("IterableDataset", dataset):
        return True
    # torch's IterableDataset inherits `__getitem__` from Dataset: only its name shows a stream.
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


def _is_a(name: str, dataset: Any) -> bool:
    return any(cls.__name__ == name for cls in type(dataset).__mro__)


def require_dataset(name: str, dataset: Any) -> None:
    """Raise TrainingError, with what to give instead, if `dataset` is none, or is empty."""
    is_text = isinstance(dataset, str | os.PathLike)
    # An iterator is its own `__iter__`: the second epoch would find it used up, and be empty. A
    # dict is Hugging Face's DatasetDict.
    is_none = is_text or isinstance(dataset, Mapping) or hasattr(dataset, "__next__")
    is_indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if is_none or _is_a("DataLoader", dataset) or not (is_indexed or is_stream(dataset)):
        hint = f"gpupool.ImageDatastore({os.fspath(dataset)!r}) is one; " if is_text else ""
        raise TrainingError(
            f"{name} is a {type(dataset).__name__}, which is no data set: {hint}give a datastore, "
            "what has len() and indexing, or an IterableDataset. Of a DataLoader give its "
            "`dataset`, and its batch size, times the number of ranks, as the option batch_size."
        )
    if is_indexed and not is_stream(dataset) and len(dataset) == 0:
        raise TrainingError(f"{name} is empty.")


def parts_of(dataset: Any) -> list[Any]:
    """What a ConcatDataset or Subset is made of; nothing of others."""
    parts = getattr(dataset, "datasets", None)
    if isinstance(parts, (list, tuple)):
        return list(parts)
    # Subset and random_split's parts; a data set that has names may wrap another one, too.
    is_part = hasattr(dataset, "dataset") and hasattr(dataset, "indices")
    return [dataset.dataset] if is_part else []


def labels_of(dataset: Any) -> Any:
    """The class of each sample, as an array; None where a sample has to be read for it."""
    import numpy as np

    if parts := parts_of(dataset):
        found = [labels_of(part) for part in parts]
        if any(labels is None for labels in found):
            return None
        if hasattr(dataset, "datasets"):
            return np.concatenate(found)
        return found[0][np.asarray(dataset.indices, dtype=int)]
    candidates = [getattr(dataset, name) for name in LABELS if hasattr(dataset, name)]
    tensors = getattr(dataset, "tensors", None)
    candidates += [tensors[1]] if isinstance(tensors, (list, tuple)) and len(tensors) == 2 else []
    for values in candidates:
        # not of ragged lists, a tensor on a GPU, or a stream
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            labels = np.asarray(values)
            # One class a sample: pixels are another matter, and their masks may be large.
            if labels.dtype.kind in "iu" and labels.shape == (len(dataset),):
                return labels
    return None


def class_names(dataset: Any) -> tuple[str, ...]:
    """The names of the classes by index, of a data set or what it is a part of; () if unknown.

    Of several data sets one after the other: the most names; `bound` tells if others have more.
    """
    if parts := parts_of(dataset):
        return max(map(class_names, parts), key=len)
    return _own_names(dataset)


def bound(dataset: Any, names: Sequence[str], what: str, whose: str) -> Any:
    """The data set with indices of its classes into `names`; as it is where it has no names.

    A TrainingError, about `what` and `whose` names, if a sample is of a class that is none of them.
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
    labels = labels_of(dataset)
    there = range(len(own)) if labels is None else set(labels.tolist())
    used = [name for index, name in enumerate(own) if index in there]
    if unknown := [name for name in used if name not in names]:
        raise TrainingError(
            f"{what} has classes that {whose} not know: {_listed(unknown)}; those are "
            f"{_listed(names)}. Leave their samples out, or train with them."
        )
    if hasattr(dataset, "with_classes"):
        return dataset.with_classes(names)
    if any(own.index(name) != names.index(name) for name in used):
        raise TrainingError(
            f"{what} counts its classes in another order ({_listed(own)}) than {_listed(names)}: "
            "give it that order."
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
    is_named = all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    return tuple(names) if is_named else ()


def _listed(names: Sequence[str]) -> str:
    return shortened(", ".join(names), 100)


def with_data(options: TrainingOptions, dataset: Any) -> TrainingOptions:
    """The options with a weight for each sample, where they ask for classes that are balanced. An
    OptionsError if the data set has no order that can be chosen, or not as many samples."""
    if options.weights is None:
        return options
    kind = type(dataset).__name__
    if is_stream(dataset) or hasattr(dataset, "epoch_order"):
        raise OptionsError(f"weights does nothing: the order of a {kind} is its own. Leave it out.")
    if isinstance(options.weights, str):
        labels = labels_of(dataset)
        if labels is None:
            raise OptionsError(
                f"weights='balanced' needs labels that are known without reading samples, which "
                f"the {kind} does not have: give one weight for each sample."
            )
        counts = Counter(labels)
        if len(counts) < 2:  # as of pairs of image and mask
            raise OptionsError(f"weights='balanced' does nothing: the {kind} has no two classes.")
        options = replace(options, weights=[1 / counts[label] for label in labels])
    assert options.weights is not None
    if len(options.weights) != len(dataset):
        raise OptionsError(
            f"weights has {len(options.weights):,} numbers, and the data set {len(dataset):,} "
            "samples: give one for each."
        )
    return options


def in_order(options: TrainingOptions) -> TrainingOptions:
    """The options for a pass over all samples, each once, in their order, that trains nothing."""
    collate: Any = options.collate
    # A function written in C has no signature.
    with contextlib.suppress(TypeError, ValueError):
        if "training" in inspect.signature(collate).parameters:
            collate = partial(collate, training=False)
    return replace(options, shuffle="never", weights=None, collate=collate)
