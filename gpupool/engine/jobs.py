"""Training as the client orders it: a packed job in, a file out. Runs on engines.

Weights pass through a file in the pool's private folder, not through the controller, which would
copy them several times.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gpupool.core.progress import progress
from gpupool.core.wire.calls import Train
from gpupool.core.wire.events import ProgressEvent
from gpupool.core.wire.replies import Reply, TrainReply
from gpupool.core.wire.state_dicts import save
from gpupool.core.wire.values import Job
from gpupool.engine import calls, control
from gpupool.engine.cells.variables import find_modules, load
from gpupool.engine.group.forming import World
from gpupool.engine.numerics.forward import deterministic
from gpupool.engine.output.emit import emit
from gpupool.engine.probe.rank_report import RankReport
from gpupool.engine.process import pool_folder, this_rank
from gpupool.engine.training.checkpoints import resuming
from gpupool.engine.training.loop import fit


def train(call: Train) -> Reply[TrainReply]:
    """Train; the first of the ranks that train saves the weights: a state dict."""
    if this_rank().rank == 0:
        emit([ProgressEvent("reading the network and the data set", 0, 0)])
    world, job = received(call.job, call.num_ranks)
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


def received(job: Job, num_ranks: int = 0) -> tuple[World, Any]:
    """This rank among those that train, and what the client has packed for them."""
    find_modules(job.sys_path)  # the job's classes may be of them
    world = World.here(torch.device(this_rank().device), num_ranks)
    return world, load(job.packed, job.sources)
