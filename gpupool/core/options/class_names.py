"""The classes of data sets, by name: the same index means the same class everywhere. Runs anywhere.

Knows data sets by what they have, and imports none of their libraries.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpupool.core.errors import TrainingError
from gpupool.core.options.datasets import is_stream

NO_CLASS = -100  # of torch's cross_entropy
_TARGETS = ("label", "labels", "target", "targets")  # columns of rows, as of Hugging Face
_SHOWN = 5


def class_names(dataset: Any) -> tuple[str, ...]:
    """The names of the classes by index, of a data set or what it is a part of; () if unknown.

    Of several data sets one after the other: those of the one that knows all others'.

    Raises TrainingError, naming the classes, if none of these does.
    """
    parts = _parts(dataset)
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
    if parts := _parts(dataset):
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
    unknown = [name for name in _used(dataset, own) if name not in names]
    if unknown:
        raise TrainingError(
            f"{what} has the class{'es' if len(unknown) > 1 else ''} {_some(unknown)}, which "
            f"{whose} not know: the classes are {_some(names)}. Leave its samples out, or train "
            "with them."
        )
    if hasattr(dataset, "with_classes"):
        return dataset.with_classes(names)
    place = {name: index for index, name in enumerate(names)}
    # A class without a sample needs no index.
    table = [place.get(name, NO_CLASS) for name in own]
    if table == list(range(len(table))):
        return dataset
    if is_stream(dataset):
        raise TrainingError(
            f"{what} is a stream that counts its classes in another order ({_some(own)}) than "
            f"{_some(names)}; give it that order."
        )
    return Relabelled(dataset, table, names)


def labels_of(dataset: Any) -> Iterator[Any]:
    """The targets of the samples, in arrays or sequences, where no sample has to be read for it."""
    if hasattr(dataset, "datasets"):
        for part in dataset.datasets:
            yield from labels_of(part)
        return
    indices = None
    while hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        own = list(dataset.indices)
        indices = own if indices is None else [own[index] for index in indices]
        dataset = dataset.dataset
    found = _labels(dataset)
    if found is not None:
        yield found if indices is None else found[indices]


class Relabelled:
    """A data set of pairs whose targets are indices of classes, counted in another order.

    Sample i has the target `table[target]`; `classes` are the names in the new order.
    """

    def __init__(self, dataset: Any, table: Sequence[int], classes: Sequence[str]) -> None:
        self.dataset, self._table, self.classes = dataset, list(table), list(classes)
        self.normalization = getattr(dataset, "normalization", None)
        found = _labels(dataset)
        self.labels = None if found is None else [self._new(label) for label in found]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self._changed(self.dataset[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of a batch, as the data set reads them best."""
        if hasattr(self.dataset, "__getitems__"):
            return [self._changed(sample) for sample in self.dataset.__getitems__(indices)]
        return [self[index] for index in indices]

    def _changed(self, sample: Any) -> Any:
        if isinstance(sample, Mapping):
            changed = {name: self._new(sample[name]) for name in _TARGETS if name in sample}
            return {**sample, **changed}
        inputs, target = sample
        return inputs, self._new(target)

    def _new(self, target: Any) -> int:
        old = int(target)
        return self._table[old] if old >= 0 else old  # below 0: no class


def _parts(dataset: Any) -> list[Any]:
    """What a data set is made of, where it has no names of its own."""
    parts = getattr(dataset, "datasets", None)  # of ConcatDataset
    if isinstance(parts, (list, tuple)):
        return list(parts)
    # Subset and random_split's parts; a data set that has names may wrap another one, too.
    is_part = hasattr(dataset, "dataset") and hasattr(dataset, "indices")
    return [dataset.dataset] if is_part else []


def _own_names(dataset: Any) -> tuple[str, ...]:
    """Names by index; () where a target may mean something else."""
    if getattr(dataset, "target_transform", None) is not None:
        return ()
    names = getattr(dataset, "classes", None)
    features = getattr(dataset, "features", None)
    if names is None and isinstance(features, Mapping):
        labels = [features[name] for name in _TARGETS if name in features]
        names = getattr(labels[0], "names", None) if len(labels) == 1 else None
    if names is None and isinstance(getattr(dataset, "class_to_idx", None), Mapping):
        numbered = dataset.class_to_idx
        names = sorted(numbered, key=numbered.__getitem__)
        if [numbered[name] for name in names] != list(range(len(names))):
            return ()
    if not isinstance(names, (list, tuple)):
        return ()
    # torchvision's ImageNet has several words for each class.
    words = [", ".join(n) if type(n) is tuple and all(_are_texts(n)) else n for n in names]
    is_named = all(_are_texts(words)) and len(set(words)) == len(words)
    return tuple(words) if is_named else ()


def _are_texts(words: Sequence[Any]) -> Iterator[bool]:
    return (isinstance(word, str) for word in words)


def _used(dataset: Any, names: Sequence[str]) -> list[str]:
    """The classes that there are samples of, as far as no sample has to be read for it."""
    labels = _labels(dataset)
    if labels is None:
        return list(names)
    import numpy as np

    found = set(np.unique(labels).tolist())
    return [name for index, name in enumerate(names) if index in found]


def _labels(dataset: Any) -> Any:
    """The target of each sample, as an array; None where a sample has to be read for it."""
    # Of ours; of torchvision's; of TensorDataset.
    own = getattr(dataset, "labels", None)
    own = getattr(dataset, "targets", None) if own is None else own
    tensors = getattr(dataset, "tensors", None)
    if own is None and isinstance(tensors, (list, tuple)) and len(tensors) == 2:
        own = tensors[1]
    if own is None or callable(own):
        return None
    import numpy as np

    try:
        found = np.asarray(own)
        is_whole = found.dtype.kind in "iu" and len(found) == len(dataset)
    except (TypeError, ValueError, RuntimeError):  # ragged lists, or a tensor on a GPU
        return None
    # One class a sample: pixels are another matter, and their masks may be large.
    return found if is_whole and found.ndim == 1 else None


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
