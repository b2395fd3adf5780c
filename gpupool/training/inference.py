"""What a network says of a data set, computed by the ranks that train. Runs on the client."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpupool.core.errors import OptionsError, TrainingError
from gpupool.core.formatting import percent
from gpupool.core.jobs import InferenceJob
from gpupool.core.network import info_of
from gpupool.core.options.datasets import class_names, is_stream, require_dataset
from gpupool.core.options.model_facts import chosen_loss
from gpupool.core.options.named_measures import LOSSES, check_loss, check_metrics
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.progress import Progress, progress
from gpupool.core.wire.calls import Call, Confusion, Evaluate, Predict
from gpupool.core.wire.events import ProgressEvent
from gpupool.core.wire.output import OutputKind
from gpupool.core.wire.replies import Value
from gpupool.core.wire.values import Job
from gpupool.data.datastores.views import Picture, Preview
from gpupool.pool.calls.execution import Execution
from gpupool.pool.pool import Pool
from gpupool.pool.session import current_pool
from gpupool.training.head import require_module
from gpupool.training.history import many
from gpupool.training.job import bind, of_inputs, send_job, with_targets

if TYPE_CHECKING:
    from torch import Tensor, nn

_OPTIONS = ("batch_size", "precision", "workers", "collate", "inputs", "targets", "seed")


class Predictions(list[str]):
    """The name of the class of each sample, in order.

    `scores` are what the network gives, as without `names=True`: a tensor (samples, classes).
    `classes` are the names of its columns.
    """

    scores: Tensor
    classes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class ConfusionMatrix:
    """`counts[i, j]` samples (or pixels) of class i were taken for class j: int64, shape (C, C).

    `classes` are the C names. Shares are NaN where nothing is to be counted.
    """

    counts: NDArray[np.int64]
    classes: tuple[str, ...]

    @property
    def num_samples(self) -> int:
        """All that have a class."""
        return int(self.counts.sum())

    @property
    def accuracy(self) -> float:
        """The share (0..1) whose class was found."""
        return float(_shares(np.trace(self.counts), self.counts.sum()))

    @property
    def recall(self) -> NDArray[np.float64]:
        """The share of each class that was found."""
        return _shares(np.diag(self.counts), self.counts.sum(1))

    @property
    def precision(self) -> NDArray[np.float64]:
        """The share of what was taken for each class that is right."""
        return _shares(np.diag(self.counts), self.counts.sum(0))

    @property
    def shares(self) -> NDArray[np.float64]:
        """`counts` as shares of the samples of each true class."""
        return _shares(self.counts, self.counts.sum(1, keepdims=True))

    def most_confused(self, num: int = 5) -> list[tuple[str, str, int]]:
        """The pairs (true, predicted, how often) that were confused most often, worst first."""
        wrong = self.counts - np.diag(np.diag(self.counts))
        places = np.argwhere(wrong).tolist()
        most = sorted(places, key=lambda place: -wrong[*place])[:num]  # of equals the first classes
        return [(self.classes[i], self.classes[j], int(wrong[i, j])) for i, j in most]

    def summary(self) -> str:
        """The whole in one line."""
        share = percent(self.accuracy if self.num_samples else None)
        samples = many(self.num_samples, "sample")
        return f"accuracy {share} on {samples}, {len(self.classes)} classes"

    def __repr__(self) -> str:
        pairs = [f"  {true} taken for {said}: {num:,}" for true, said, num in self.most_confused()]
        return "\n".join([f"ConfusionMatrix: {self.summary()}", *pairs])


class WorstSamples(Preview):
    """Samples with the highest losses, the highest first: pictures in a notebook, else a table.

    `indices` are their places in the data set, `losses` their losses. The label of each says what
    was found and what is true.
    """

    indices: list[int]
    losses: list[float]

    def __repr__(self) -> str:
        lines = [f"{' '.join(one.label.split())}  {one.url}".rstrip() for one in self]
        return "\n  ".join([self.title, *lines])


def predict(
    model: nn.Module,
    dataset: Any,
    *,
    names: bool = False,
    transform: Any = None,
    pool: Pool | None = None,
    **reading: Any,
) -> Any:
    """The outputs of `model` for every sample, in order, on the CPU; each rank computes a part.

    Pictures are decoded as in training: uint8, 0..1 on the device, and what `result.model` knows:
    its normalization, and the height and width it was trained on, where pictures or files are given
    rather than a data set.

    Args:
        dataset: a data set with targets or without; a tensor or array (samples, ...); one picture
            or a list of them (of Pillow, uint8 arrays, paths, URLs); the URL of a folder, whose
            pictures come sorted by path; an iterator of inputs, which is read to its end first.
        names: the names of the classes instead of outputs: `Predictions`, a list of texts with
            `scores`.
        transform: what pictures go through that are no data set.
        pool: where; the notebook's pool, which is started if none runs, unless given.
        reading: batch_size (256 unless given), precision, workers, collate, inputs and targets, as
            in `TrainingOptions`.

    Returns:
        A tensor of shape (samples, ...): for a classifier (samples, classes). Of a network
        with several outputs a dict or list of such. Samples are their first dimension.

    Raises:
        TrainingError: it is no network or no data set, or has classes that the network does not
            know; or nobody knows the names that are asked for.
        OptionsError: an option is wrong, or does nothing here.
        SpmdError: a rank failed.
    """
    require_module(model)
    dataset = of_inputs(dataset, model)
    classes = _classes_of(model, dataset) if names else ()
    if names and not classes:
        raise TrainingError(
            "names=True: neither the network nor the data know names of classes; train with data "
            "that have them, as an ImageDatastore, or take the index: predict(...).argmax(1)."
        )
    outputs = _outputs(_job("predict", model, dataset, reading, transform=transform), pool)
    return _named(outputs, classes) if names else outputs


def evaluate(
    model: nn.Module,
    dataset: Any,
    metrics: Any = ("accuracy",),
    *,
    loss: Any = None,
    pool: Pool | None = None,
    **reading: Any,
) -> dict[str, float]:
    """The metrics of `model` over all samples, and its loss if one is given, by name.

    They do not depend on the number of ranks, nor on `batch_size`: each sample counts once.

    Args:
        metrics: names ("accuracy", "top5", "precision", "recall", "f1", "auc", "pixel_accuracy",
            "mean_iou", "rmse", "mse", "mae", "r2", "token_accuracy", "perplexity"; those of classes
            are means over the classes, as scikit-learn's "macro"), functions (outputs, targets) ->
            mean over the samples, metrics of torchmetrics, or a dict {name of an output: one or
            several of these}. Pixels of class -100 count nowhere.
        loss: as for `train`.
        pool, reading: as those of `predict`.

    Raises what `predict` raises, and TrainingError for an unknown metric.
    """
    check_metrics(metrics)
    if loss is not None:
        check_loss(loss)
    dataset, loss = with_targets(dataset, model), chosen_loss(loss, model)
    job = _job("evaluate", model, dataset, reading, metrics=metrics, loss=loss)
    # All ranks have summed the same over all samples, so the first one's values are everybody's.
    return dict(_ask("Evaluating", job, pool, Evaluate)[0])


def confusion(
    model: nn.Module,
    dataset: Any,
    *,
    classes: Sequence[str] | None = None,
    pool: Pool | None = None,
    **reading: Any,
) -> ConfusionMatrix:
    """Count which class `model` takes each sample for: pixels, where targets are maps.

    Of outputs with one number, those above 0 are the second of two classes. Targets of -100 count
    nowhere.

    Args:
        classes: names by index; unless given those of the network, of the data set, or indices.
        pool, reading: as those of `predict`.

    Raises what `predict` raises, and TrainingError for another number of `classes`.
    """
    dataset = with_targets(dataset, model)
    job = _job("confusion", model, dataset, reading)
    counts = _ask("Counting classes", job, pool, Confusion)
    # A rank without a sample does not know how many classes the network has, and sends None.
    total = np.sum([np.array(c, np.int64) for c in counts if c is not None], axis=0)
    if classes is not None and len(classes) != len(total):
        raise TrainingError(
            f"classes= has {len(classes)} names, the network has {len(total)} outputs."
        )
    known = classes or _classes_of(model, dataset)
    names = [str(name) for name in (*known, *range(len(known), len(total)))]
    return ConfusionMatrix(total, tuple(names[: len(total)]))


def worst_samples(
    model: nn.Module,
    dataset: Any,
    num: int,
    loss: Any = "auto",
    pool: Pool | None = None,
    **reading: Any,
) -> WorstSamples:
    """See `TrainingResult.worst`."""
    from torch import nn

    dataset, loss = with_targets(dataset, model), chosen_loss(loss, model)
    of_torch = getattr(nn, LOSSES[loss])() if isinstance(loss, str) and loss in LOSSES else loss
    if is_stream(dataset) or not hasattr(of_torch, "reduction"):
        raise TrainingError(
            "worst needs samples with an index, and a loss of torch for each: give these, as "
            "result.worst(16, dataset=data, loss='cross_entropy')."
        )
    job = _job("worst", model, dataset, reading, loss=loss, keeps_targets=True)
    outputs, targets = _outputs(job, pool)
    outputs = _main_output(outputs)
    are_scores = outputs.ndim > 1 and outputs.shape[1] > 1 and not targets.is_floating_point()
    targets = targets.long() if are_scores else targets.to(outputs.dtype).view_as(outputs)
    of_each = copy.copy(of_torch)
    of_each.reduction = "none"
    losses = of_each(outputs, targets).double().reshape(len(targets), -1).mean(1)
    # NaN is before all others, and of equal losses the first sample.
    order = losses.argsort(descending=True, stable=True)[:num]
    found = outputs[order].argmax(1) if are_scores else outputs[order]
    classes = _classes_of(model, dataset) if are_scores else ()
    words = zip(_words(found, classes), _words(targets[order], classes), strict=True)
    pictures = [
        _picture(dataset, i, f"{said}\ntrue: {true}\nloss {losses[i]:.4g}, #{i}")
        for i, (said, true) in zip(order.tolist(), words, strict=True)
    ]
    worst = WorstSamples(pictures, f"samples with the highest loss: {len(order)}")
    worst.indices, worst.losses = order.tolist(), losses[order].tolist()
    return worst


# ---- what is asked of the ranks ------------------------------------------------------------------


def _job(
    what: str, model: nn.Module, dataset: Any, reading: Mapping[str, Any], **asked: Any
) -> InferenceJob:
    """A pass of a network over a data set, checked; `asked` are other fields of the job."""
    for name in reading:
        if name not in _OPTIONS:
            raise OptionsError(
                f"{name} does nothing in {what}(), which takes {', '.join(_OPTIONS)}."
            )
    options = TrainingOptions(**{"batch_size": 256, **reading})
    require_module(model)
    require_dataset("dataset", dataset)
    return bind(InferenceJob(model, dataset, options, **asked), what)


def _ask(
    doing: str, job: InferenceJob, pool: Pool | None, call: Callable[[Job], Call[Value]]
) -> list[Value]:
    """The values of the ranks that train, in their order; meanwhile a bar says `doing`."""
    pool = current_pool(create=True) if pool is None else pool
    sent, ranks = send_job(pool, job), pool.training_ranks
    try:
        sent.bring_constants(pool, ranks)
        with progress(doing, unit="samples") as bar:
            calls = dict.fromkeys(ranks, call(sent.wire))
            values = Execution(pool, calls, partial(_show, bar)).result()
    finally:  # it holds the network and the data set, and may be large
        sent.contents.clear()
    return [values[rank] for rank in ranks]


def _show(bar: Progress, rank: int, kind: OutputKind, content: Any) -> None:
    for event in content if kind is OutputKind.EVENTS else ():
        if isinstance(event, ProgressEvent) and event.what == "samples":
            bar.update(event.done, event.total or None)
        elif isinstance(event, ProgressEvent):
            bar.tell("" if 0 < event.total <= event.done else event.what)


def _outputs(job: InferenceJob, pool: Pool | None) -> Any:
    import torch

    pool = current_pool(create=True) if pool is None else pool
    # Through files: the controller would copy outputs several times, and hold them in memory.
    result_path = pool.engines.new_file("outputs.pt")
    _ask("Predicting", job, pool, partial(Predict, result_name=result_path.name))
    parts = []
    with progress("Reading the outputs", len(pool.training_ranks), "ranks") as bar:
        for i, rank in enumerate(pool.training_ranks):
            there = result_path.with_name(f"{result_path.name}.{i}")
            path = pool.carrier.bring_file(rank, there)
            # The ranks have left tensors, dicts and lists: no code has to run.
            parts.append(torch.load(path, weights_only=True))
            path.unlink()
            bar.advance()
    # Each rank has a share of every batch.
    batches = chain.from_iterable(zip(*parts, strict=True))
    return _together([batch for batch in batches if batch is not None])


def _together(batches: list[Any]) -> Any:
    import torch

    first = batches[0]
    if isinstance(first, dict):
        return {name: _together([batch[name] for batch in batches]) for name in first}
    if isinstance(first, list):
        return [_together(list(parts)) for parts in zip(*batches, strict=True)]
    return None if first is None else torch.cat(batches)


def _classes_of(model: nn.Module, dataset: Any) -> tuple[str, ...]:
    return info_of(model).classes or class_names(dataset)


def _main_output(outputs: Any) -> Any:
    # As Hugging Face's networks and torchvision's name it.
    return outputs.get("logits", outputs.get("out")) if isinstance(outputs, dict) else outputs


def _named(outputs: Any, classes: Sequence[str]) -> Predictions:
    """The class of each sample by its highest score; of one score, the second of two above 0."""
    import torch

    outputs = _main_output(outputs)
    shape = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else ()
    if len(shape) == 2 and shape[1] == 1 and len(classes) == 2:
        found = (outputs[:, 0] > 0).long()
    elif len(shape) == 2 and shape[1] >= len(classes):
        found = outputs[:, : len(classes)].argmax(1)
    else:
        raise TrainingError(
            f"names=True: the outputs are {shape or type(outputs).__name__}, not a score of each "
            f"of {len(classes)} classes for each sample; take them as they are, without names."
        )
    names = Predictions(classes[index] for index in found.tolist())
    names.scores, names.classes = outputs, tuple(classes)
    return names


def _shares(part: Any, whole: Any) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore", divide="ignore"):  # 0 / 0 is NaN
        return np.asarray(np.true_divide(part, whole), np.float64)


def _words(values: Tensor, classes: tuple[str, ...]) -> list[str]:
    """Classes by their names, where they have some, or numbers; of several numbers their shape."""
    if values[:1].numel() != 1:
        return [str(tuple(values.shape[1:]))] * len(values)
    known = dict(enumerate(classes))
    return [known.get(value, f"{value:.4g}") for value in values.flatten().tolist()]


def _picture(dataset: Any, index: int, label: str) -> Picture:
    import torch

    url = dataset.name(index) if hasattr(dataset, "count_each_label") else ""  # a datastore of ours
    sample = dataset[index]
    image = sample[0] if isinstance(sample, (tuple, list)) else None
    if not isinstance(image, torch.Tensor) or image.ndim != 3 or image.shape[0] not in (1, 3):
        return Picture(b"", label, url, problem="no image")
    shares = image / 255 if image.dtype == torch.uint8 else image
    low, high = float(shares.min()), float(shares.max())
    if low < 0 or high > 1:  # no shares of white: from the darkest to the lightest
        shares = (shares - low) / max(high - low, 1e-12)
    pixels = shares.mul(255).round().byte().permute(1, 2, 0).squeeze(2).numpy()
    return Picture.of(pixels, label, url)
