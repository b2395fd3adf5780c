"""How long training stands still for a checkpoint: written in the background, against at once.

    python benchmarks/checkpoint.py [--url s3://bucket/run]

A ResNet-18 with SGD's momentum (90 MB) is saved again and again, in turn in both ways, while
nothing else goes on. Also told: how much slower steps are while one is written.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
import torchvision
from torch import nn

from gpupool.engine.checkpoint.files import Checkpoints

ROUNDS = 12
AIM = 0.10


def main() -> None:
    """Measure and print a table; exits with 1 if the aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", help="where to; a temporary folder unless given")
    url = parser.parse_args().url
    torch.set_num_threads(1)
    model = torchvision.models.resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    step_s(model, optimizer)  # momentum is there after the first
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(url or folder)
        checkpoints.check()
        measured = [one_round(checkpoints, model, optimizer, number) for number in range(ROUNDS)]
        checkpoints.finish()
    columns = [statistics.median(column) for column in zip(*measured[2:], strict=True)]
    at_once, stall, quiet, meanwhile = columns
    print("| a checkpoint of 90 MB | median ms |")
    print("|---|---|")
    print(f"| written at once | {1000 * at_once:.1f} |")
    print(f"| in the background: training stands still | {1000 * stall:.1f} |")
    print(f"| a step, with none being written | {1000 * quiet:.1f} |")
    print(f"| a step, while one is written | {1000 * meanwhile:.1f} |")
    print(f"\nThe stall is {stall / at_once:.1%} of a save at once; the aim is {AIM:.0%}.")
    raise SystemExit(stall > AIM * at_once)


def one_round(
    checkpoints: Checkpoints, model: nn.Module, optimizer: torch.optim.Optimizer, number: int
) -> tuple[float, float, float, float]:
    """Seconds of a save at once, of the stall, of a step alone, of a step while one is written."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    began = time.perf_counter()
    checkpoints.save(state, 2 * number, wait=True)
    at_once = time.perf_counter() - began
    quiet = step_s(model, optimizer)
    began = time.perf_counter()
    checkpoints.save(state, 2 * number + 1)
    stall = time.perf_counter() - began
    meanwhile = step_s(model, optimizer)
    checkpoints.finish()
    return at_once, stall, quiet, meanwhile


def step_s(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Seconds of one optimizer step."""
    began = time.perf_counter()
    optimizer.zero_grad()
    model(torch.ones(4, 3, 64, 64)).square().mean().backward()
    optimizer.step()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
