"""What the client orders: training, outputs of a network, metrics and counts over a data set.

Runs on engines. A packed job comes in; weights and outputs go out as files in the pool's private
folder, not through the controller, which would copy them several times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpupool.core.errors import TrainingError
from gpupool.core.jobs import InferenceJob
from gpupool.core.options.datasets import NO_CLASS
from gpupool.core.progress import progress
from gpupool.core.wire.calls import Train
from gpupool.core.wire.events import ProgressEvent
from gpupool.core.wire.replies import Reply, TrainReply
from gpupool.core.wire.state_dicts import save
from gpupool.core.wire.values import Job
from gpupool.data.reading import loader
from gpupool.data.reading.inputs import of_inputs
from gpupool.data.reading.trees import tensors
from gpupool.engine import calls, control
from gpupool.engine.batches.form import form_of, main_output
from gpupool.engine.batches.shares import Share, num_samples
from gpupool.engine.cells.variables import find_modules, load
from gpupool.engine.group.forming import World
from gpupool.engine.metrics.evaluation import Evaluation, each_share
from gpupool.engine.metrics.metrics import labelled, likeliest, make_metrics
from gpupool.engine.numerics.forward import deterministic
from gpupool.engine.numerics.losses import NO_LOSS, make_loss, require_outputs
from gpupool.engine.output.emit import emit
from gpupool.engine.probe.rank_report import RankReport
from gpupool.engine.process import pool_folder, this_rank
from gpupool.engine.training.checkpoints import resuming
from gpupool.engine.training.loop import fit


def train(call: Train) -> Reply[TrainReply]:
    """Train; the first of the ranks that train saves a state dict."""
    if this_rank().rank == 0:
        emit([ProgressEvent("reading the network and the data set", 0, 0)])
    world, job = _received(call.job, call.num_ranks)
    if call.again:
        job = replace(job, options=resuming(job.options, world))
    stops_at_once = partial(control.stops_at_once, call.job.name)
    with deterministic(job.options.deterministic):
        found = fit(
            **vars(job),
            world=world,
            emit=emit,
            stop_requested=partial(control.stop_requested, call.job.name),
            stops_at_once=stops_at_once,
            rank_report=RankReport(this_rank().rank, world.device, emit),
        )
    if world.rank == 0:
        with (
            calls.uninterrupted() if stops_at_once() else nullcontext(),
            progress("saving the network"),
            (pool_folder() / call.result_name).open("w+b") as file,
        ):
            save(found.model.state_dict(), file)
    reply = TrainReply(found.network.normalization, found.network.input_shape)
    # an interrupt has aborted the collectives of the group
    return Reply(reply, group_wanting=stops_at_once())


def predict(sent: Job, result_name: str) -> None:
    """Save what the network gives for this rank's share of each batch, or pairs with the targets.

    Batch i of the whole is entry i of each rank's list; None is an empty share.
    """
    world, job = _received(sent)
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
    world, job = _received(sent)
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

    world, job = _received(sent)
    _pass(job, world, count)
    return counts[0].tolist() if counts else None


def _received(job: Job, num_ranks: int = 0) -> tuple[World, Any]:
    """This rank among those that train, and what the client has packed for them."""
    find_modules(job.sys_path)  # the job's classes may be of them
    world = World.here(torch.device(this_rank().device), num_ranks)
    return world, load(job.packed, job.sources)


@loader.kept()
def _pass(job: InferenceJob, world: World, use: Callable[[Any, Share], object]) -> None:
    """Call `use` for each share of the data set; fewer outputs than the data need are an error."""
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
    for tensor in tensors(outputs):
        if tensor.shape[:1] != (num,):
            raise TrainingError(
                f"the network gives a tensor of shape {tuple(tensor.shape)} for {num} samples: the "
                "first dimension of every output must be the samples, in order. Transpose it in "
                "forward(), or give it a network around it that returns what you want of it."
            )


def _plain(outputs: Any) -> Any:
    """Outputs on the CPU, in plain dicts and lists: what `torch.load` reads by default."""
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
