"""A network over a data set, as the client orders it: outputs, values of metrics, or counts.

Runs on engines. A packed job comes in; outputs go out as files, numbers as the reply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gpupool.core.errors import TrainingError
from gpupool.core.jobs import InferenceJob
from gpupool.core.options.datasets import NO_CLASS
from gpupool.core.progress import progress
from gpupool.core.wire.values import Job
from gpupool.data.reading import loader
from gpupool.data.reading.inputs import of_inputs
from gpupool.data.reading.trees import tensors
from gpupool.engine.batches.form import form_of, main_output
from gpupool.engine.batches.shares import Share, num_samples
from gpupool.engine.group.forming import World
from gpupool.engine.jobs import received
from gpupool.engine.metrics.evaluation import Evaluation, each_share
from gpupool.engine.metrics.metrics import labelled, likeliest, make_metrics
from gpupool.engine.numerics.losses import NO_LOSS, make_loss, require_outputs
from gpupool.engine.process import pool_folder


def predict(sent: Job, result_name: str) -> None:
    """Save what the network gives for this rank's share of each batch, or pairs with the targets.

    Batch i of the whole is entry i of each rank's list; None is an empty share. The number that
    ends the file's name counts the ranks that train.
    """
    world, job = received(sent)
    outputs: list[Any] = []

    def keep(given: Any, share: Share) -> None:
        _check_rows(given, share.num_here)
        is_pair = job.keeps_targets and share.num_here
        outputs.append(_plain([given, share.targets] if is_pair else given))

    if not job.keeps_targets:
        shape = job.network.input_shape if job.network else ()
        job = replace(job, dataset=of_inputs(job.dataset, shape, job.transform))
    _pass(job, world, keep)
    with progress("saving the outputs"):
        torch.save(outputs, pool_folder() / f"{result_name}.{world.rank}")


def evaluate(sent: Job) -> dict[str, float]:
    """Loss and metrics over the data set, the same on every rank."""
    world, job = received(sent)
    loss = NO_LOSS
    if job.loss is not None:
        loss = make_loss(job.loss, world.device, model=job.model, weight=job.options.weight)
    metrics = make_metrics(job.metrics, scored=loss.scored, ignored=loss.ignored)
    found = Evaluation(loss, world, job.options, metrics)
    _pass(job, world, found.add)
    mean_loss, _, _, values = found.values()
    return values if job.loss is None else {"loss": mean_loss, **values}


def confusion(sent: Job) -> list[list[int]] | None:
    """Counts of this rank's samples, true classes by those predicted; None if it had no sample."""
    counts: list[Tensor] = []

    def count(outputs: Any, share: Share) -> None:
        if share.num_here:
            scored = NO_LOSS.scored(outputs, share.targets)
            found, actual, num = labelled(*scored, NO_CLASS, likeliest)
            places = (actual * num + found[:, 0]).bincount(minlength=num**2)
            counts[:] = [sum(counts, places.view(num, num))]

    world, job = received(sent)
    _pass(job, world, count)
    return counts[0].tolist() if counts else None


@loader.kept()
def _pass(job: InferenceJob, world: World, use: Callable[[Any, Share], object]) -> None:
    """Call `use` for each share of the data set: see `each_share`.

    The first rank reports from the start how many samples of all ranks are done. The network
    refuses to give fewer outputs than the data need.
    """
    model = job.model.to(world.device)
    if job.num_classes > 2:  # one output is enough for two classes
        model.register_forward_hook(
            lambda model, given, outputs: require_outputs(main_output(outputs), job.num_classes)
        )
    # Without a loss, a network may want to see its labels.
    form = form_of(model, NO_LOSS if job.loss is None else job.loss, job.options)
    # The normalization that the network was trained with; a data set may ask for one itself.
    scaling = job.network.normalization if job.network else None
    with progress("samples", num_samples(job.dataset) or None, "samples") as bar:
        each_share(model, job.dataset, world, job.options, use, bar, scaling, form)


def _check_rows(outputs: Any, num: int) -> None:
    """Raise TrainingError if outputs have not one row for each of `num` samples."""
    for tensor in tensors(outputs):
        if tensor.shape[:1] != (num,):
            raise TrainingError(
                f"the network gives a tensor of shape {tuple(tensor.shape)} for {num} samples: the "
                "first dimension of every output must be the samples, in order. Transpose it in "
                "forward(), or give it a network around it that returns what you want of it."
            )


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
