"""A network over a data set, as the client orders it: outputs, values or a confusion matrix.

Runs on engines. A pickled job comes in; outputs go out as files, numbers as the reply.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpupool.core.errors import TrainingError
from gpupool.core.jobs import InferenceJob
from gpupool.core.options.datasets import is_stream
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.progress import Course, Progress, progress
from gpupool.data.reading import shards, subsets
from gpupool.data.reading.loader import load_batches
from gpupool.data.reading.samples import Draw
from gpupool.engine.batches.share import (
    Dataset,
    as_input,
    normalization_of,
    num_samples,
    read_ahead,
)
from gpupool.engine.batches.shares import epoch_shares
from gpupool.engine.batches.transfer import transfer
from gpupool.engine.batches.trees import main_output
from gpupool.engine.group.forming import World
from gpupool.engine.jobs import load_job, world_here
from gpupool.engine.metrics.evaluation import evaluate as run_evaluation
from gpupool.engine.metrics.evaluation import mean_loss
from gpupool.engine.metrics.metrics import make_metrics
from gpupool.engine.metrics.named import classes, confusion_counts
from gpupool.engine.numerics.class_loss import NO_CLASS
from gpupool.engine.numerics.forward import autocast
from gpupool.engine.numerics.losses import NO_LOSS, make_loss
from gpupool.engine.output.emit import emit_progress


def predict(job_path: str, result_path: str) -> None:
    """Save what the network gives for this rank's part of the samples: a list of batches' outputs.

    The parts follow each other; of a stream, batch i of the whole is entry i of each rank's list,
    one rank after the other. The number that ends the file's name counts the ranks that train.
    """
    world, job = world_here(), load_job(job_path, InferenceJob)
    model = job.model.to(world.device).eval()
    outputs: list[Any] = []
    with torch.no_grad(), _counted("predict", job.dataset, world) as bar:
        for inputs in _inputs(job.dataset, job.batch_size, world):
            bar.advance(job.batch_size)  # about: that of all ranks
            if inputs is None:
                outputs.append(None)
                continue
            with autocast(world.device, job.precision):
                outputs.append(_plain(model(inputs)))
    with progress("saving the outputs"):
        torch.save(outputs, f"{result_path}.{world.rank}")


def evaluate(job_path: str) -> dict[str, float]:
    """Loss and metrics over the data set, the same on every rank."""
    world, job = world_here(), load_job(job_path, InferenceJob)
    loss = NO_LOSS if job.loss is None else make_loss(job.loss, world.device)
    metrics = make_metrics(job.metrics, world.device, scored=loss.scored, ignored=loss.ignored)
    options, dataset = _options(job), job.dataset
    with _counted("evaluate", dataset, world) as bar:
        found = run_evaluation(
            job.model.to(world.device),
            dataset,
            loss,
            world,
            options,
            metrics=metrics,
            on_share=lambda share: bar.advance(share.num_all),
        )
    sums = world.sum(found.sums).tolist()
    _check_complete(dataset, int(sums[-1]))
    values = {} if job.loss is None else {"loss": mean_loss(sums, loss.num_terms)}
    return values | metrics.compute(world)


def confusion(job_path: str) -> list[list[int]] | None:
    """Counts of this rank's samples: rows are true classes, columns those predicted.

    None if it had no sample.
    """
    world, job = world_here(), load_job(job_path, InferenceJob)
    model = job.model.to(world.device).eval()
    counts: Tensor | None = None
    options = _options(job)
    with torch.no_grad(), _counted("confusion", job.dataset, world) as bar:
        for share in epoch_shares(job.dataset, options, world, 1, draw=Draw(options.seed, 0)):
            bar.advance(share.num_all)
            if not share.num_here:
                continue
            with autocast(world.device, options.precision):
                outputs = main_output(model(share.inputs))
            predicted, actual, num_classes = classes(outputs, share.targets)
            new = confusion_counts(predicted, actual, num_classes, NO_CLASS)
            counts = new if counts is None else counts + new
    return None if counts is None else counts.long().tolist()


def _counted(what: str, dataset: Dataset, world: World) -> AbstractContextManager[Progress]:
    """Counts the samples of all ranks; the first rank reports from the start how many are done."""
    draw = emit_progress if world.rank == 0 else _unseen
    return progress(what, num_samples(dataset) or None, "samples", after_s=0.0, draw=draw)


def _unseen(course: Course) -> None:
    """Draws nothing."""


def _options(job: InferenceJob) -> TrainingOptions:
    return TrainingOptions(batch_size=job.batch_size, precision=job.precision, shuffle="never")


def _inputs(dataset: Dataset, batch_size: int, world: World) -> Iterator[Any]:
    """The inputs of this rank's samples, a batch after the other; None for an empty one."""
    if is_stream(dataset):
        options = TrainingOptions(batch_size=batch_size, shuffle="never")
        for share in epoch_shares(dataset, options, world, 1, draw=Draw(0, 0)):
            yield share.inputs if share.num_here else None
        return
    dataset = subsets.opened(dataset)
    mine = shards.shard(np.arange(len(dataset)), world.rank, world.size)
    part = max(1, batch_size // world.size)
    batches = [mine[i : i + part] for i in range(0, len(mine), part)]
    loading = load_batches(
        dataset, batches, depth=read_ahead(), device=world.device, draw=Draw(0, 0)
    )
    normalization = normalization_of(dataset, world.device)
    with closing(loading), transfer(world.device) as on_way:
        for loaded in loading:
            assert loaded is not None  # no batch is empty
            (inputs,) = on_way.bring(inputs=loaded.inputs)
            yield as_input(inputs, normalization)
            on_way.end_step()


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
