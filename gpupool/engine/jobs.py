"""Training as the client orders it: a pickled job in, files out. Runs on engines.

Models and weights pass through files in the pool's private folder, not through the controller,
which would copy them several times.
"""

from __future__ import annotations

import pickle
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

import cloudpickle
import torch
from torch import nn
from tqdm.utils import CallbackIOWrapper

from gpupool.core.progress import BYTES, progress
from gpupool.core.wire.events import ProgressEvent
from gpupool.core.wire.state_dicts import packed
from gpupool.engine import calls, control
from gpupool.engine.cells.variables import find_modules
from gpupool.engine.group.forming import World
from gpupool.engine.output.emit import emit
from gpupool.engine.probe.rank_report import RankReport
from gpupool.engine.process import this_rank
from gpupool.engine.training.loop import fit
from gpupool.engine.training.saving import resuming


def train(
    job_path: str, result_path: str, num_ranks: int, on_gpu: bool, again: bool = False
) -> dict[str, Any]:
    """Train; the first of the ranks that train saves the weights: a state dict as `packed`.

    `again`: an earlier attempt has lost a rank, and its checkpoints are resumed from.
    """
    device = torch.device(this_rank()["device"] if on_gpu else "cpu")
    world = World.of(num_ranks, device)
    if world.rank == 0:
        emit([ProgressEvent("reading the network and the data set", 0, 0)])
    job = load_job(job_path)
    if again:
        job["options"] = resuming(job["options"])
    stop_requested = partial(control.stop_requested, job_path)
    stops_at_once = partial(control.stops_at_once, job_path)
    with closing(RankReport(this_rank()["rank"], world.device, emit)) as report:
        found = fit(
            **job,
            world=world,
            emit=emit,
            stop_requested=stop_requested,
            stops_at_once=stops_at_once,
            report=report,
        )
    if world.rank == 0:
        with calls.uninterrupted() if stops_at_once() else nullcontext():
            save_weights(found.model, result_path)
    scale = found.normalization
    return {
        "normalization": None if scale is None else [list(part) for part in scale],
        "group_wanting": stops_at_once(),  # its collectives were aborted
    }


def save_weights(model: nn.Module, path: str) -> None:
    """Leave the weights in a file for the client, which gives them to `unpacked`."""
    state = model.state_dict()
    num_bytes = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    with open(path, "wb") as file, progress("saving the network", num_bytes, BYTES) as bar:
        torch.save(packed(state), CallbackIOWrapper(bar.advance, file, "write"))


def world_here() -> World:
    """This rank among those that train."""
    return World.here(torch.device(this_rank()["device"]))


def load_job(job_path: str) -> dict[str, Any]:
    """What the client has written for the ranks."""
    # The client wrote this file into the pool's private folder; it is as trusted as a cell.
    with open(job_path, "rb") as file:
        find_modules(pickle.load(file))  # nosec B301 # the job's classes may be of them
        return dict(cloudpickle.load(file))
