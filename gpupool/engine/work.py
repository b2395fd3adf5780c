"""Training and prediction as the client orders them: a pickled job in, files out. Runs on engines.

Models and weights pass through files in the pool's private folder, not through the controller,
which would copy them several times.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import nn

from gpupool.data import nested, shards
from gpupool.data.loader import load_batches
from gpupool.data.samples import Draw
from gpupool.engine import control
from gpupool.engine.batches import Dataset, as_input, moved, normalization_of, read_ahead
from gpupool.engine.boot import this_rank
from gpupool.engine.emit import emit
from gpupool.engine.group import World
from gpupool.engine.loop import fit


def train(job_path: str, result_path: str) -> dict[str, Any]:
    """Train; the first of the ranks that train saves the weights: a state dict of CPU tensors."""
    control.clear_stop()
    world = _world()
    job = _load(job_path)
    model = fit(**job, world=world, emit=emit, stop_requested=control.stop_requested)
    if world.rank == 0:
        torch.save({k: v.cpu() for k, v in model.state_dict().items()}, result_path)
    return {}


def predict(job_path: str, result_path: str) -> dict[str, Any]:
    """Save the model's outputs for this rank's contiguous part of the samples, in order.

    The number that ends the file's name counts the ranks that train.
    """
    world = _world()
    job = _load(job_path)
    outputs = _outputs(job["model"].to(world.device), job["dataset"], job["batch_size"], world)
    torch.save(outputs, f"{result_path}.{world.rank}")
    return {"num_samples": 0 if outputs is None else len(outputs)}


def _outputs(
    model: nn.Module, dataset: Dataset, batch_size: int, world: World
) -> torch.Tensor | None:
    dataset = nested.opened(dataset)
    mine = shards.shard(np.arange(len(dataset)), world.rank, world.size)
    share = max(1, batch_size // world.size)
    batches = [mine[i : i + share] for i in range(0, len(mine), share)]
    model.eval()
    loading = load_batches(
        dataset, batches, depth=read_ahead(), device=world.device, draw=Draw(0, 0)
    )
    normalization = normalization_of(dataset, world.device)
    parts = []
    with torch.no_grad(), closing(loading):
        for loaded in loading:
            assert loaded is not None  # no batch is empty
            inputs = as_input(moved("inputs", loaded.inputs, world.device), normalization)
            parts.append(model(inputs).cpu())
    return torch.cat(parts) if parts else None


def _world() -> World:
    return World.here(torch.device(this_rank()["device"]))


def _load(job_path: str) -> dict[str, Any]:
    # The client wrote this file into the pool's private folder; it is as trusted as a cell.
    return dict(cloudpickle.loads(Path(job_path).read_bytes()))
