"""Small networks and data for the checks of numbers; torch is loaded when they are made."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset


def points(number: int, width: int) -> TensorDataset:
    """Vectors, each with the index of the largest of its first three numbers."""
    import torch
    from torch.utils.data import TensorDataset

    inputs = torch.randn(number, width, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def pictures(number: int, size: int, *, double: bool = False) -> TensorDataset:
    """Noise in three colours, each with the index of the brightest colour."""
    import torch
    from torch.utils.data import TensorDataset

    dtype = torch.float64 if double else torch.float32
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(number, 3, size, size, generator=generator, dtype=dtype)
    return TensorDataset(inputs, inputs.mean((2, 3)).argmax(1))


def layers(width: int = 8, hidden: int = 32, depth: int = 1) -> nn.Module:
    """A network of linear layers."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    made: list[nn.Module] = [nn.Linear(width, hidden), nn.ReLU()]
    for _ in range(depth - 1):
        made += [nn.Linear(hidden, hidden), nn.ReLU()]
    return nn.Sequential(*made, nn.Linear(hidden, 3))


def convolutions(*, double: bool = False) -> nn.Module:
    """A network of convolutions with batch norm, which GPUs can compute deterministically."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 3),
    )
    return made.double() if double else made


def apart(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of two networks' numbers."""
    import torch

    first, second = (
        torch.cat([value.double().flatten() for value in model.state_dict().values()])
        for model in (one, other)
    )
    return float((first - second).abs().max())


class Damaged:
    """A data set whose `at`th sample that the last rank reads raises."""

    def __init__(self, data: TensorDataset, rank: int, at: int) -> None:
        self._data, self._rank, self._left = data, rank, at

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if int(os.environ["RANK"]) == self._rank:
            self._left -= 1
            if self._left == 0:
                raise ValueError("damaged on purpose")
        sample: tuple[torch.Tensor, ...] = self._data[index]
        return sample


def resnet18() -> Any:
    """torchvision's, for ten classes."""
    import torch
    import torchvision

    torch.manual_seed(0)
    return torchvision.models.resnet18(num_classes=10)
