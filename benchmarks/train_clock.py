"""Models for the benchmark of training, and a clock in the model itself, the same for every way."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


@dataclass
class Times:
    """When each forward began, and how much CPU this process had used then (all its threads)."""

    first_at: float = 0.0  # time.time(): to be compared with another process of this machine
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


last = Times()  # of the last training in this process


def take_last() -> Times:
    """The times of the last training in this process; the next one begins anew."""
    global last
    taken, last = last, Times()
    return taken


class Clocked(nn.Module):
    """A model that notes when its forward begins: from one to the next it is a whole step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        if not last.wall_s:
            last.first_at = time.time()
        last.wall_s.append(time.perf_counter())
        last.cpu_s.append(time.process_time())
        outputs: Tensor = self.model(inputs)
        return outputs


@dataclass(frozen=True)
class Case:
    """What is trained: inputs of `shape`, `batch` of them a rank."""

    name: str
    shape: tuple[int, ...]
    batch: int
    warm: int
    steps: int

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        if self.name == "micro":  # almost no work: what a step costs besides
            return Clocked(nn.Sequential(nn.Flatten(), nn.Linear(16, 10)))
        if self.name == "tiny":
            return Clocked(_tiny())
        from torchvision.models import resnet18

        return Clocked(resnet18(num_classes=10))

    def data(self, world_size: int) -> TensorDataset:
        """Enough for one epoch of all steps, and the one whose forward is the end of the last."""
        num = self.batch * world_size * (self.warm + self.steps + 1)
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(num, *self.shape, generator=generator)
        return TensorDataset(inputs, torch.randint(0, 10, (num,), generator=generator))

    def numbers(self, times: Times) -> tuple[list[float], float]:
        """Wall seconds of each step after the warm ones, and their mean CPU seconds."""
        wall, cpu = times.wall_s[self.warm :], times.cpu_s[self.warm :]
        if len(wall) != self.steps + 1:
            raise RuntimeError(f"{len(times.wall_s)} steps were made, not all of {self}")
        each = [end - start for start, end in pairwise(wall)]
        return each, (cpu[-1] - cpu[0]) / self.steps


CASES = {
    case.name: case
    for case in (
        Case("micro", (1, 4, 4), 4, warm=20, steps=200),
        Case("tiny", (1, 28, 28), 16, warm=10, steps=40),
        Case("resnet18", (3, 64, 64), 16, warm=2, steps=8),
    )
}


def _tiny() -> nn.Module:
    """0.1 M parameters, some milliseconds a step."""
    layers: list[nn.Module] = []
    for channels_in, channels in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(channels_in, channels, 3, 2, 1), nn.BatchNorm2d(channels), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*layers, *head, nn.Linear(256, 10))
