"""Which samples an epoch has, and in which batches: by weights, by lengths, or by a sampler.

Runs anywhere; no torch. `check` looks at the options alone. `with_data` looks at the data set, and
puts numbers in the place of names and functions, so that every rank draws from the same ones.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from gpupool.core.errors import OptionsError
from gpupool.core.options.datasets import is_stream
from gpupool.core.options.fields import TrainingFields

Options = TypeVar("Options", bound=TrainingFields)

NAMES = ("weights", "bucket_by", "batch_sampler")
_LABELS = ("labels", "label", "targets", "target")  # what data sets and their columns call them


def check(options: TrainingFields) -> None:
    """Refuse malformed values; numbers become an array of their own."""
    weights, by, sampler = options.weights, options.bucket_by, options.batch_sampler
    if isinstance(weights, str) and weights != "balanced":
        raise OptionsError.of("weights", weights, "give numbers, or 'balanced'.", "unknown")
    if weights is not None and not isinstance(weights, str):
        found = _numbers("weights", weights)
        if not sum(found) > 0:
            raise OptionsError("weights: one must be above 0.", "range", "weights")
        object.__setattr__(options, "weights", found)  # frozen, and not finished yet
    if by is not None and not (isinstance(by, str) or callable(by)):
        object.__setattr__(options, "bucket_by", _numbers("bucket_by", by))
    for name in ("weights", "bucket_by"):
        if getattr(options, name) is not None and options.shuffle == "never":
            raise OptionsError(
                f"{name} and shuffle='never' exclude each other: {name} draws the order of an "
                "epoch. Leave one of them out; shuffle='once' draws it once.",
                "conflict",
                name,
            )
    if sampler is not None:
        _check_sampler(sampler)


def with_data(options: Options, dataset: Any) -> Options:
    """The options with a number for each sample, where they name a column, classes or a function.

    Raises:
        OptionsError: the data set has no order that can be chosen, or not as many samples.
    """
    chosen = [name for name in NAMES if getattr(options, name) is not None]
    if not chosen:
        return options
    if is_stream(dataset):
        raise OptionsError(
            f"{chosen[0]} needs a data set with an index; the stream {type(dataset).__name__} "
            "gives its samples in an order of its own. Give a map-style data set, or let the "
            "stream choose its samples.",
            "stream",
            chosen[0],
        )
    if hasattr(dataset, "epoch_order"):
        raise OptionsError(
            f"{chosen[0]} does nothing with a {type(dataset).__name__}, which orders its epochs "
            "so that what is read for one sample serves the next ones. Leave it out.",
            "no effect",
            chosen[0],
        )
    weights, by = options.weights, options.bucket_by
    if isinstance(weights, str):
        options = replace(options, weights=_balanced(dataset))
    if isinstance(by, str):
        options = replace(options, bucket_by=[_length(one) for one in _column(dataset, by)])
    elif callable(by):
        options = replace(options, bucket_by=[by(index) for index in range(len(dataset))])
    for name in ("weights", "bucket_by"):
        numbers: Any = getattr(options, name)
        if numbers is not None and len(numbers) != len(dataset):
            raise OptionsError(
                f"{name} has {len(numbers):,} numbers, and the data set {len(dataset):,} samples: "
                "give one for each.",
                "length",
                name,
            )
    return options


def steps_per_epoch(options: TrainingFields, num_samples: int | None) -> int:
    """How many batches an epoch has; 0 where nobody knows."""
    if options.batch_sampler is not None:
        try:
            return len(options.batch_sampler)  # type: ignore[arg-type]
        except TypeError:  # it has none
            return 0
    return -(-num_samples // options.batch_size) if num_samples else 0


def in_order(options: Options) -> Options:
    """The options for a pass over all samples, each once, in their order.

    Its batches are as large as those of a `batch_sampler`, as far as that shows.
    """
    sampler, size = options.batch_sampler, options.batch_size
    if isinstance(sampler, Sequence):
        size = max(map(len, sampler), default=size)
    elif sampler is not None:
        size = getattr(sampler, "batch_size", None) or size
    return replace(
        options,
        shuffle="never",
        weights=None,
        bucket_by=None,
        batch_sampler=None,
        batch_size=max(size, options.accumulate),
    )


def _check_sampler(sampler: object) -> None:
    kind = type(sampler).__name__
    if hasattr(sampler, "__next__"):
        raise OptionsError(
            f"batch_sampler is a {kind}, which can be iterated only once: pass an object whose "
            "__iter__ begins again each epoch, or a list of lists of indices.",
            "iterator",
            "batch_sampler",
        )
    if isinstance(sampler, (str, Mapping)) or not hasattr(sampler, "__iter__"):
        raise OptionsError(
            f"batch_sampler is a {kind}: give something that gives lists of indices, as "
            "torch.utils.data.BatchSampler does.",
            "type",
            "batch_sampler",
        )


def _numbers(name: str, values: Any) -> array[float]:
    """One for each sample, as 8 bytes each: a data set may have millions."""
    if isinstance(values, array):  # checked before
        return values
    if hasattr(values, "tolist"):  # of torch, numpy and pandas
        values = values.tolist()
    try:
        if isinstance(values, (str, Mapping)) or not isinstance(values, Iterable):
            raise TypeError
        found = array("d", values)
    except TypeError:
        raise OptionsError(f"{name}: give one number for each sample.", "type", name) from None
    bad = next((place for place, one in enumerate(found) if not 0 <= one < math.inf), None)
    if bad is not None:
        raise OptionsError(
            f"{name}: {found[bad]:g} of sample {bad} must be finite and not negative.",
            "range",
            name,
        )
    return found


def _balanced(dataset: Any) -> list[float]:
    """Weights with which each class is drawn as often as any other."""
    labels = _labels(dataset)
    if labels is None:
        raise OptionsError(
            f"weights='balanced' needs labels that are known without reading samples, which the "
            f"{type(dataset).__name__} does not have: give one weight for each sample.",
            "no labels",
            "weights",
        )
    counts = Counter(labels)
    return [1 / counts[label] for label in labels]


def _labels(dataset: Any) -> list[Any] | None:
    """The class of each sample, of data sets that have them at hand."""
    if _is_part(dataset):
        whole = _labels(dataset.dataset)
        return whole and [whole[index] for index in dataset.indices]
    if type(dataset).__name__ == "ConcatDataset":
        parts = [_labels(part) for part in dataset.datasets]
        return None if None in parts else [one for part in parts for one in part or ()]
    columns = getattr(dataset, "column_names", None) or ()
    found = [dataset[name] for name in _LABELS if name in columns]
    found += [getattr(dataset, name) for name in _LABELS if hasattr(dataset, name)]
    found += list(getattr(dataset, "tensors", ()))[-1:]  # a TensorDataset's targets
    for values in found:
        if hasattr(values, "is_floating_point") and values.is_floating_point():
            continue
        labels = values.tolist() if hasattr(values, "tolist") else list(values)
        if len(labels) == len(dataset) and all(isinstance(one, (int, str)) for one in labels):
            return labels
    return None


def _column(dataset: Any, name: str) -> Iterable[Any]:
    """A column of a data set of rows, or of a part of one."""
    if _is_part(dataset):
        whole = list(_column(dataset.dataset, name))
        return [whole[index] for index in dataset.indices]
    columns = getattr(dataset, "column_names", None) or ()
    if name not in columns:
        has = f"the columns {', '.join(columns)}" if columns else "no columns"
        raise OptionsError(
            f"bucket_by={name!r}: the {type(dataset).__name__} has {has}. Give the name of one, "
            "the lengths, or a function of the index.",
            "no column",
            "bucket_by",
        )
    values: Iterable[Any] = dataset[name]
    return values


def _is_part(dataset: Any) -> bool:
    return type(dataset).__name__ == "Subset" and hasattr(dataset, "indices")


def _length(value: Any) -> float:
    return len(value) if hasattr(value, "__len__") else value
