"""Which data sets can be trained on, and the error for any other. Runs anywhere; no torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from gpupool.core.errors import TrainingError

LABELS = ("label", "labels", "target", "targets")  # what data sets and their columns call them


def is_stream(dataset: Any) -> bool:
    """Whether it is only walked through: an IterableDataset, as torch's or Hugging Face's.

    >>> is_stream([1, 2]), is_stream({1, 2})
    (False, True)
    """
    if "IterableDataset" in _class_names(dataset):
        return True
    # torch's IterableDataset inherits `__getitem__` from Dataset: only its name shows a stream.
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


def num_samples(dataset: Any) -> int | None:
    """How many samples it has; None where only a whole pass would show it.

    >>> num_samples([1, 2]), num_samples(None)
    (2, None)
    """
    try:
        return len(dataset)
    except TypeError:  # there is no len(), or it says so itself
        return None


def require_dataset(name: str, dataset: Any) -> None:
    """Raise TrainingError, with what to give instead, if `dataset` is none, or is empty."""
    kind = type(dataset).__name__
    if "DataLoader" in _class_names(dataset):
        raise TrainingError(
            f"{name} is a {kind}: give its data set, {name}.dataset, and its batch size as "
            "TrainingOptions(batch_size=...), which is that of all ranks together."
        )
    if isinstance(dataset, (str, os.PathLike)):
        raise TrainingError(
            f"{name} is a text: gpupool.ImageDatastore({os.fspath(dataset)!r}) makes a data set of "
            "the images there."
        )
    if isinstance(dataset, Mapping):  # as Hugging Face's DatasetDict
        raise TrainingError(
            f"{name} is a dict of {', '.join(map(repr, dataset))}: give one of its data sets, or "
            "pairs of inputs and targets."
        )
    # An iterator is its own `__iter__`: the second epoch would find it used up, and be empty.
    if hasattr(dataset, "__next__"):
        raise TrainingError(
            f"{name} is a {kind}, which can be iterated only once: pass a "
            "torch.utils.data.IterableDataset, whose __iter__ begins again each epoch."
        )
    if is_stream(dataset):
        return
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TrainingError(
            f"{name} is a {kind}: a data set needs len() and indexing, like "
            "gpupool.ImageDatastore or torch.utils.data.TensorDataset, or an IterableDataset."
        )
    if len(dataset) == 0:
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


def _class_names(dataset: Any) -> set[str]:
    # By name, as this module imports neither torch nor Hugging Face's datasets.
    return {cls.__name__ for cls in type(dataset).__mro__}
