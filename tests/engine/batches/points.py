"""A data set to be drawn from; the ranks import this, so it imports little."""

from __future__ import annotations

from typing import Any

import torch


class Points:
    """Points of 8 numbers in 3 classes, with noise that torch draws."""

    def __init__(self, num: int, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(num, 8, generator=generator, dtype=torch.float64)
        self.targets = self.inputs[:, :3].argmax(1)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        noise = self.noise * torch.rand(8, dtype=torch.float64)
        return self.inputs[index] + noise, self.targets[index]
