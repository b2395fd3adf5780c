"""How often each sample comes in an epoch, by weights. Runs anywhere; no torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from gpupool.core.errors import OptionsError
from gpupool.core.options.datasets import is_stream
from gpupool.core.options.training_options import TrainingOptions

_LABELS = ("labels", "label", "targets", "target")  # what data sets and their columns call them


def with_data(options: TrainingOptions, dataset: Any) -> TrainingOptions:
    """The options with a weight for each sample, where they ask for classes that are balanced.

    Raises:
        OptionsError: the data set has no order that can be chosen, or not as many samples.
    """
    if options.weights is None:
        return options
    if is_stream(dataset):
        raise OptionsError(
            f"weights needs a data set with an index; the stream {type(dataset).__name__} gives "
            "its samples in an order of its own. Give a map-style data set, or let the stream "
            "choose its samples."
        )
    if hasattr(dataset, "epoch_order"):
        raise OptionsError(
            f"weights does nothing with a {type(dataset).__name__}, which orders its epochs so "
            "that what is read for one sample serves the next ones. Leave it out."
        )
    if isinstance(options.weights, str):
        options = replace(options, weights=_balanced(dataset))
    assert options.weights is not None
    if len(options.weights) != len(dataset):
        raise OptionsError(
            f"weights has {len(options.weights):,} numbers, and the data set {len(dataset):,} "
            "samples: give one for each."
        )
    return options


def in_order(options: TrainingOptions) -> TrainingOptions:
    """The options for a pass over all samples, each once, in their order."""
    return replace(options, shuffle="never", weights=None)


def _balanced(dataset: Any) -> list[float]:
    """Weights with which each class is drawn as often as any other."""
    labels = _labels(dataset)
    if labels is None:
        raise OptionsError(
            f"weights='balanced' needs labels that are known without reading samples, which the "
            f"{type(dataset).__name__} does not have: give one weight for each sample."
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


def _is_part(dataset: Any) -> bool:
    return type(dataset).__name__ == "Subset" and hasattr(dataset, "indices")
