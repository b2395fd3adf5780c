"""What a data set and a network know of each other: classes by name, normalization, numbers.

Runs on the client, before anything is sent.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpupool.core.errors import OptionsError, TrainingError
from gpupool.core.jobs import InferenceJob, TrainingJob
from gpupool.core.network import NetworkInfo, Scaling, in_words, info_of
from gpupool.core.options.datasets import NO_CLASS, bound, class_names, labels_of, parts_of
from gpupool.core.options.named_measures import CLASS_METRICS

_CLASS_LOSSES = ("cross_entropy", "nll", "CrossEntropyLoss", "NLLLoss")


def bind_training(job: TrainingJob) -> TrainingJob:
    """The job with the classes of its network and data matched by name.

    Raises:
        TrainingError: one has classes that the others do not know.
        OptionsError: one has a normalization of its own.
    """
    known, fits = info_of(job.model), job.options.normalize == "fit"
    names = known.classes or class_names(job.dataset)
    whose = "the network does" if known.classes else "the training data do"
    dataset = bound(job.dataset, names, "dataset", whose)
    validation = bound(job.validation, names, "validation", whose)
    labels = labels_of(dataset)
    if labels is not None and len(labels) and (labels == NO_CLASS).all():
        raise TrainingError(
            "the images of dataset have no labels, and training needs them: see labels= of "
            "gpupool.ImageDatastore."
        )
    own = None if fits else _scaling_of(dataset)
    scaling = own or (None if fits else known.normalization)
    if not fits:
        _check_scaling("validation", validation, "the training data", scaling)
    num_classes = max(_num_outputs(one, job.loss) for one in (dataset, validation))
    is_raw = own is None and (fits or scaling is not None)
    network = NetworkInfo(names, scaling, from_raw=is_raw)
    return replace(
        job, dataset=dataset, validation=validation, network=network, num_classes=num_classes
    )


def bind(job: InferenceJob, what: str) -> InferenceJob:
    """The job with its data as the network counts its classes; what has no names is left as it is.

    Raises:
        TrainingError: the data have classes that the network does not know.
        OptionsError: they have another normalization.
    """
    known, dataset = info_of(job.model), job.dataset
    names, ours = class_names(dataset), known.normalization
    # Pictures below one folder that is no class are new ones, to be predicted.
    if not (what == "predict" and len(names) == 1 and names[0] not in known.classes):
        dataset = bound(dataset, known.classes, "dataset", "the network does")
    own = None if ours is None else _check_scaling("dataset", dataset, "the network", ours)
    # Tensors and new pictures are raw, and so are data like those of a training on raw ones;
    # other data sets with classes may be normalized in their own way.
    if ours is not None and own is None and names and not known.from_raw:
        warnings.warn(
            f"{what}: the data set has no normalization; that of the network's training is applied "
            f"({in_words(ours)}). Its own transform must not normalize as well.",
            stacklevel=2,
        )
    # With a metric of classes, the outputs must be as many, as with a loss over classes.
    metrics = [job.metrics] if isinstance(job.metrics, str) else job.metrics
    are_names = not isinstance(metrics, Mapping) and any(m in CLASS_METRICS for m in metrics)
    loss = "cross_entropy" if what == "confusion" or are_names else job.loss
    return replace(job, dataset=dataset, network=known, num_classes=_num_outputs(dataset, loss))


def _scaling_of(dataset: Any) -> Scaling | None:
    """The normalization that a data set asks for, or all that it is made of; None without one."""
    found = getattr(dataset, "normalization", None)
    if found is not None:
        mean, std = found
        return tuple(map(float, mean)), tuple(map(float, std))
    asked = {_scaling_of(part) for part in parts_of(dataset)}
    return asked.pop() if len(asked) == 1 else None


def _check_scaling(what: str, dataset: Any, whose: str, ours: Scaling | None) -> Scaling | None:
    """The normalization of a data set: none, or that of the others."""
    own = _scaling_of(dataset)
    if own is not None and own != ours:
        there = "has none" if ours is None else f"has {in_words(ours)}"
        raise OptionsError(
            f"{what} has a normalization of its own ({in_words(own)}), and {whose} {there}: give "
            "both the same by with_normalization."
        )
    return own


def _num_outputs(dataset: Any, loss: Any) -> int:
    """How many outputs a loss over classes needs, as far as no sample has to be read for it.

    0 for another loss, and where only the samples show it.
    """
    if (loss if isinstance(loss, str) else type(loss).__name__) not in _CLASS_LOSSES:
        return 0
    num_names, labels = len(class_names(dataset)), labels_of(dataset)
    if labels is None:
        return num_names
    ignored = getattr(loss, "ignore_index", NO_CLASS)
    counted = labels[(labels != ignored) & (labels != NO_CLASS)]
    # On a GPU it would cost the rank.
    if len(counted) and counted.min() < 0:
        raise TrainingError(
            f"the targets have class {counted.min()}: classes are counted from 0, and {ignored} "
            "means none."
        )
    return max(num_names, int(counted.max(initial=-1)) + 1)
