"""A network over a data set, as the client orders it: outputs, values, counts or the worst samples.

Runs on engines. A packed job comes in; outputs go out as files, numbers as the reply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gpupool.core.errors import TrainingError
from gpupool.core.jobs import InferenceJob
from gpupool.core.network import NetworkInfo
from gpupool.core.options.datasets import is_stream
from gpupool.core.options.named_measures import name_of
from gpupool.core.progress import Course, Progress, progress
from gpupool.core.wire.replies import WorstSample
from gpupool.core.wire.values import Job
from gpupool.data.loading import ways
from gpupool.data.reading.inputs import of_inputs
from gpupool.data.reading.normalization import Normalization
from gpupool.data.reading.samples import Draw
from gpupool.data.reading.shards import shard
from gpupool.engine.batches.form import BatchForm, called, form_of
from gpupool.engine.batches.share import Dataset, Share, normalization_of, num_samples
from gpupool.engine.batches.shares import epoch_shares
from gpupool.engine.batches.trees import main_output
from gpupool.engine.group.forming import World
from gpupool.engine.jobs import load_job, world_here
from gpupool.engine.metrics.evaluation import evaluate as run_evaluation
from gpupool.engine.metrics.evaluation import mean_loss
from gpupool.engine.metrics.metrics import make_metrics
from gpupool.engine.metrics.named import classes, confusion_counts
from gpupool.engine.numerics.class_loss import NO_CLASS, require_outputs
from gpupool.engine.numerics.forward import autocast
from gpupool.engine.numerics.losses import NO_LOSS, make_loss
from gpupool.engine.output.emit import emit_progress
from gpupool.engine.worst import Worst, own_scaling


@ways.kept()
def predict(sent: Job, result_path: str) -> None:
    """Save what the network gives for this rank's share of each batch: a list of outputs.

    Batch i of the whole is entry i of each rank's list, one rank after the other; None is an empty
    share. The number that ends the file's name counts the ranks that train.
    """
    world, job = world_here(), load_job(sent, InferenceJob)
    shape = _known(job).input_shape
    job = replace(job, dataset=of_inputs(job.dataset, shape, job.transform))
    outputs: list[Any] = []
    _each("predict", job, world, lambda given, share: outputs.append(_plain(given)))
    with progress("saving the outputs"):
        torch.save(outputs, f"{result_path}.{world.rank}")


@ways.kept()
def evaluate(sent: Job) -> dict[str, float]:
    """Loss and metrics over the data set, the same on every rank."""
    world, job = world_here(), load_job(sent, InferenceJob)
    loss = NO_LOSS
    if job.loss is not None:
        loss = make_loss(job.loss, world.device, model=job.model, weight=job.options.weight)
    metrics = make_metrics(job.metrics, world.device, scored=loss.scored, ignored=loss.ignored)
    options, dataset = job.options, job.dataset
    with _counted("evaluate", dataset, world) as bar:
        found = run_evaluation(
            _model(job, world),
            dataset,
            loss,
            world,
            options,
            metrics,
            _scaling(job),
            on_share=lambda share: bar.advance(share.num_all),
            form=_form(job),
        )
    sums = world.sum(found.sums).tolist()
    _check_complete(dataset, int(sums[-1]))
    values = {} if job.loss is None else {"loss": mean_loss(sums, loss.num_terms)}
    return values | metrics.compute(world)


@ways.kept()
def confusion(sent: Job) -> list[list[int]] | None:
    """Counts of this rank's samples: rows are true classes, columns those predicted.

    None if it had no sample.
    """
    world, job = world_here(), load_job(sent, InferenceJob)
    counts: list[Tensor] = []

    def count(outputs: Any, share: Share) -> None:
        if share.num_here:
            scored = classes(*NO_LOSS.scored(outputs, share.targets))
            counts[:] = [confusion_counts(*scored, NO_CLASS) + (counts[0] if counts else 0)]

    _each("confusion", job, world, count)
    return counts[0].long().tolist() if counts else None


@ways.kept()
def worst(sent: Job, num: int) -> list[WorstSample]:
    """This rank's samples with the highest loss, at most `num`, the highest first."""
    world, job = world_here(), load_job(sent, InferenceJob)
    loss = make_loss(job.loss, world.device, model=job.model)
    scaling = normalization_of(ways.opened(job.dataset), world.device, _scaling(job))
    scaling = own_scaling(job.dataset) if scaling is None else scaling
    is_binary = job.num_classes == 2 or "bce" in name_of(job.loss).lower()
    found = Worst(num, loss, scaling, is_binary=is_binary)
    begin = 0  # of the batch, in the data set

    def add(outputs: Any, share: Share) -> None:
        nonlocal begin
        batch = np.arange(begin, begin + share.num_all)
        begin += share.num_all
        if share.num_here:
            found.add(outputs, share, shard(batch, world.rank, world.size).tolist())

    _each("worst", job, world, add)
    return [_with_png(sample, image) for sample, image in found.found()]


def _with_png(sample: WorstSample, image: Tensor | None) -> WorstSample:
    if image is None:
        return sample
    from gpupool.data.datastores.preview import small_png  # torchvision: only for pictures

    size = int(image.shape[2]), int(image.shape[1])
    return replace(sample, png=small_png(image), size=size)


def _model(job: InferenceJob, world: World) -> nn.Module:
    """The network on the rank's device, which refuses to give fewer outputs than the data need."""
    model: nn.Module = job.model.to(world.device)
    if job.num_classes > 2:  # one output is enough for two classes
        model.register_forward_hook(
            lambda model, given, outputs: require_outputs(main_output(outputs), job.num_classes)
        )
    return model


def _counted(what: str, dataset: Dataset, world: World) -> AbstractContextManager[Progress]:
    """Counts the samples of all ranks; the first rank reports from the start how many are done."""
    draw = emit_progress if world.rank == 0 else _unseen
    return progress(what, num_samples(dataset) or None, "samples", after_s=0.0, draw=draw)


def _unseen(course: Course) -> None:
    """Draws nothing."""


def _each(what: str, job: InferenceJob, world: World, use: Callable[[Any, Share], object]) -> None:
    """Call `use` with what the network gives for this rank's share of each batch, in evaluation
    mode: None for an empty share. Augmentation, if there is any, is as in validations."""
    model = _model(job, world).eval()
    shares = epoch_shares(
        job.dataset,
        job.options,
        world,
        1,
        draw=Draw(job.options.seed, 0),
        normalization=_scaling(job),
        form=_form(job),
    )
    with torch.no_grad(), _counted(what, job.dataset, world) as bar:
        for share in shares:
            bar.advance(share.num_all)
            with autocast(world.device, job.options.precision):
                use(called(model, share.inputs) if share.num_here else None, share)


def _scaling(job: InferenceJob) -> Normalization | None:
    """The normalization that the network was trained with; a data set may ask for one itself."""
    known = _known(job).normalization
    return None if known is None else Normalization(*known)


def _known(job: InferenceJob) -> NetworkInfo:
    return job.network or NetworkInfo()


def _form(job: InferenceJob) -> BatchForm:
    """How batches are used; without a loss, by a network that may want to see its labels."""
    loss = NO_LOSS if job.loss is None else job.loss
    return form_of(job.model, loss, job.options)


def _plain(outputs: Any) -> Any:
    """Outputs on the CPU, in plain dicts and lists: what `torch.load` reads by default.

    A named tuple becomes a dict; a tensor that a network computed in less precision is float32.
    """
    if isinstance(outputs, Tensor):
        is_half = outputs.dtype in (torch.bfloat16, torch.float16)
        return outputs.to("cpu", torch.float32 if is_half else outputs.dtype)
    if isinstance(outputs, Mapping):
        return {str(name): _plain(part) for name, part in outputs.items()}
    if hasattr(outputs, "_asdict"):
        return _plain(outputs._asdict())
    if isinstance(outputs, (list, tuple)):
        return [_plain(part) for part in outputs]
    return None


def _check_complete(dataset: Dataset, num_counted: int) -> None:
    if not is_stream(dataset) and num_counted != num_samples(dataset):
        raise TrainingError(
            f"{num_counted:,} samples were counted of {num_samples(dataset):,}; this is a fault of "
            "gpupool, please report it.",
            "miscounted",
        )
