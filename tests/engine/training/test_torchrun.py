"""The loop under plain torchrun gives what `train()` gives on a pool, bit for bit.

Run as a script, it is that of torchrun: test_torchrun.py RESULTS.json CHECKPOINTS
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gpupool import TrainingOptions, TrainingRun
from gpupool.core.wire.events import StepEvent
from gpupool.engine.group.forming import World
from gpupool.engine.training.loop import fit
from tests.support.pools import Pools
from tests.support.trainings import samples

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
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


def normed() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3)
    return nn.Sequential(*layers)


def outcome(losses: list[float], model: nn.Module) -> dict[str, Any]:
    state = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    return {"losses": losses, "state": state}


def test_losses_and_weights_are_those_of_train_although_it_went_on_from_a_checkpoint(
    pools: Pools, tmp_path: Path
) -> None:
    results_path = tmp_path / "results.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.engine.training.test_torchrun", str(results_path), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=150)
    result = TrainingRun(pools[2], normed(), samples(50), "cross_entropy", RICH, None).result()
    assert json.loads(results_path.read_text()) == outcome(result.history.loss, result.model)


def main() -> None:
    dist.init_process_group("gloo")
    losses: dict[int, float] = {}  # a training that goes on tells its earlier steps again

    def emit(events: Any) -> None:
        losses.update((e.step, e.loss) for e in events if isinstance(e, StepEvent))

    for max_steps in (6, None):
        options = replace(RICH, checkpoint=sys.argv[2], resume="auto", max_steps=max_steps)
        world = World.here(torch.device("cpu"))
        result = fit(normed(), samples(50), "cross_entropy", options, world=world, emit=emit)
    if dist.get_rank() == 0:
        found = outcome([losses[step] for step in sorted(losses)], result.model)
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
