"""The same training on a pool and under plain torchrun; run as a script, that of the latter.

    torchrun --nproc-per-node=2 twin.py RESULTS.json CHECKPOINTS

It imports nothing of the client's.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.wire.events import StepEvent
from gpupool.engine.group.forming import World
from gpupool.engine.training.loop import fit

RICH = TrainingOptions(
    optimizer="adamw",
    batch_size=13,
    lr=0.01,
    epochs=3,
    warmup=3,
    accumulate=2,
    batch_norm="sync",
    clip=0.5,
    ema=0.8,
)


def data() -> TensorDataset:
    """50 points in 3 classes."""
    inputs = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def network() -> nn.Module:
    """With batch norm and dropout."""
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3)
    return nn.Sequential(*layers)


def outcome(losses: list[float], model: nn.Module) -> dict[str, Any]:
    """What is compared: every loss, and every number in the network."""
    state = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    return {"losses": losses, "state": state}


def main() -> None:
    dist.init_process_group("gloo")
    losses: dict[int, float] = {}  # a training that goes on tells its earlier steps again

    def emit(events: Any) -> None:
        losses.update((e.step, e.loss) for e in events if isinstance(e, StepEvent))

    for max_steps in (6, None):
        options = replace(RICH, checkpoint=sys.argv[2], resume="auto", max_steps=max_steps)
        world = World.here(torch.device("cpu"))
        result = fit(network(), data(), "cross_entropy", options, world=world, emit=emit)
    if dist.get_rank() == 0:
        found = outcome([losses[step] for step in sorted(losses)], result.model)
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
