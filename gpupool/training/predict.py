"""Run a network over a data set on the ranks that train. Runs on the client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from gpupool.core.errors import OptionsError, TrainingError
from gpupool.core.jobs import InferenceJob
from gpupool.core.network import info_of
from gpupool.core.options.datasets import class_names, require_dataset
from gpupool.core.options.model_facts import chosen_loss
from gpupool.core.options.named_measures import check_loss, check_metrics
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.progress import Progress, progress
from gpupool.core.wire.calls import Call, Evaluate, Predict
from gpupool.core.wire.events import ProgressEvent
from gpupool.core.wire.output import OutputKind
from gpupool.core.wire.replies import Value
from gpupool.core.wire.values import Job
from gpupool.pool.calls.execution import Execution
from gpupool.pool.pool import Pool
from gpupool.pool.session import current_pool
from gpupool.training.binding import bind
from gpupool.training.head import require_module
from gpupool.training.inputs import of_inputs, with_targets
from gpupool.training.job import send_job

if TYPE_CHECKING:
    from torch import Tensor, nn

# What a training and a pass over a data set have in common: how samples are read and computed.
_OPTIONS = ("batch_size", "precision", "workers", "collate", "inputs", "targets", "seed")


class Predictions(list[str]):
    """The name of the class of each sample, in order.

    `scores` are what the network gives, as without `names=True`: a tensor (samples, classes).
    `classes` are the names of its columns.
    """

    scores: Tensor
    classes: tuple[str, ...]


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
        TrainingError: the input is not a network or no data, or has classes that the network does
            not know; names of classes are asked for, and nobody knows them.
        OptionsError: an option is wrong, or does nothing here.
        SpmdError: a rank failed.
    """
    require_module(model)
    dataset = of_inputs(dataset, model)
    classes = info_of(model).classes or class_names(dataset) if names else ()
    if names and not classes:
        raise TrainingError(
            "names=True: neither the network nor the data know names of classes; train with data "
            "that have them, as an ImageDatastore, or take the index: predict(...).argmax(1)."
        )
    outputs = outputs_of(job_of("predict", model, dataset, reading, transform=transform), pool)
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
        pool: where; the notebook's pool, which is started if none runs, unless given.
        reading: as those of `predict`.

    Raises:
        TrainingError: the input is not a network or not a data set, or a metric is unknown.
        OptionsError: an option is wrong, or does nothing here.
        SpmdError: a rank failed.
    """
    check_metrics(metrics)
    if loss is not None:
        check_loss(loss)
    dataset, loss = with_targets(dataset, model), chosen_loss(loss, model)
    job = job_of("evaluate", model, dataset, reading, metrics=metrics, loss=loss)
    # All ranks have summed the same over all samples, so the first one's values are everybody's.
    return dict(ask("Evaluating", job, pool, Evaluate)[0])


def job_of(
    what: str, model: nn.Module, dataset: Any, reading: Mapping[str, Any], **asked: Any
) -> InferenceJob:
    """A pass of a network over a data set, checked; `asked` are further parts of the job.

    Raises:
        TrainingError: the model is no network, or the data set is none.
        OptionsError: an option is wrong, or does nothing without training.
    """
    for name in reading:
        if name not in _OPTIONS:
            raise OptionsError(
                f"{name} does nothing in {what}(), which takes {', '.join(_OPTIONS)}."
            )
    options = TrainingOptions(**{"batch_size": 256, **reading})
    require_module(model)
    require_dataset("dataset", dataset)
    return bind(InferenceJob(model, dataset, options, **asked), what)


def ask(
    doing: str, job: InferenceJob, pool: Pool | None, call: Callable[[Job], Call[Value]]
) -> list[Value]:
    """Have the ranks that train do a job; the values in the order of the ranks.

    Args:
        doing: what a bar says.
        call: makes the call of the job that was sent.

    Raises:
        TrainingError: something cannot be sent.
        SpmdError: a rank failed.
    """
    pool = _pool(pool)
    sent, ranks = send_job(pool, job), pool.training_ranks
    try:
        sent.bring_constants(pool, ranks)
        with progress(doing, unit="samples") as bar:
            calls = dict.fromkeys(ranks, call(sent.wire))
            values = Execution(pool, calls, partial(_show, bar)).result()
    # Also after an error: the job holds the network and the data set, and may be large.
    finally:
        sent.contents.clear()
    return [values[rank] for rank in ranks]


def _show(bar: Progress, rank: int, kind: OutputKind, content: Any) -> None:
    """Have `bar` show how far the ranks are; what they print is dropped."""
    for event in content if kind is OutputKind.EVENTS else ():
        # What a rank does besides, reading the network say, is a note in the same bar.
        if isinstance(event, ProgressEvent) and event.what == "samples":
            bar.update(event.done, event.total or None)
        elif isinstance(event, ProgressEvent):
            bar.tell("" if 0 < event.total <= event.done else event.what)


def _pool(given: Pool | None) -> Pool:
    pool = current_pool(create=True) if given is None else given
    if not isinstance(pool, Pool):
        raise TrainingError(f"pool={pool!r}: give what gpupool.start() returns, or leave it out.")
    return pool


def outputs_of(job: InferenceJob, pool: Pool | None) -> Any:
    """What the ranks have computed for every sample, in order, on the CPU; see `ask`."""
    import torch

    pool = _pool(pool)
    # Through files: the controller would copy outputs several times, and hold them in memory.
    result_path = pool.engines.new_file("outputs.pt")
    ask("Predicting", job, pool, partial(Predict, result_name=result_path.name))
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


def main_output(outputs: Any) -> Any:
    """What a network is about, as torchvision's and Hugging Face's name it in a dict."""
    return outputs.get("logits", outputs.get("out")) if isinstance(outputs, dict) else outputs


def _named(outputs: Any, classes: Sequence[str]) -> Predictions:
    """The class of each sample by its highest score; of one score, the second of two above 0."""
    import torch

    outputs = main_output(outputs)
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


def _together(batches: list[Any]) -> Any:
    """One tensor of those of the batches; likewise in dicts and lists."""
    import torch

    first = batches[0]
    if isinstance(first, dict):
        return {name: _together([batch[name] for batch in batches]) for name in first}
    if isinstance(first, list):
        return [_together(list(parts)) for parts in zip(*batches, strict=True)]
    return None if first is None else torch.cat(batches)
