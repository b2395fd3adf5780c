"""How often each sample comes in an epoch, by weights. Runs anywhere; no torch."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

from gpupool.core.errors import OptionsError
from gpupool.core.options.datasets import LABELS, is_stream, labels_of
from gpupool.core.options.training_options import TrainingOptions


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
    """The options for a pass over all samples, each once, in their order, that trains nothing."""
    collate: Any = options.collate
    if collate is not None and _takes_training(collate):
        collate = partial(collate, training=False)
    return replace(options, shuffle="never", weights=None, collate=collate)


def _takes_training(collate: Any) -> bool:
    try:
        return "training" in inspect.signature(collate).parameters
    except (TypeError, ValueError):  # a function written in C
        return False


def _balanced(dataset: Any) -> list[float]:
    """Weights with which each class is drawn as often as any other."""
    labels = labels_of(dataset)
    columns = [name for name in LABELS if name in (getattr(dataset, "column_names", None) or ())]
    if labels is None and columns:  # of Hugging Face
        labels = dataset[columns[0]]
    if labels is None:
        raise OptionsError(
            f"weights='balanced' needs labels that are known without reading samples, which the "
            f"{type(dataset).__name__} does not have: give one weight for each sample."
        )
    counts = Counter(labels)
    return [1 / counts[label] for label in labels]
