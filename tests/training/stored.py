"""Data sets in memory, and a callback that looks at it; the ranks import this."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

MAPPED = "/memfd:gpupool"


def mapped_bytes(key: str) -> int:
    """Of this process: "Rss", "Pss" or "Anonymous" (copied by a write) of what ranks share."""
    found, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_ours = MAPPED in line
        elif is_ours and line.startswith(f"{key}:"):
            found += int(line.split()[1]) * 1024
    return found


class Arrays:
    """Points in numpy arrays, and a list of tensors; all of them are read with the first sample."""

    def __init__(self, num: int, width: int) -> None:
        self.inputs = np.random.default_rng(0).random((num, width), np.float32)
        self.targets = [torch.tensor(i % 3) for i in range(num)]
        self.extra = [torch.full((1 << 16,), i, dtype=torch.float32) for i in range(16)]
        self.is_read = False

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        if not self.is_read:
            self.is_read = True
            self.inputs.sum() + sum(part.sum() for part in self.extra)
        return self.inputs[index], self.targets[index]


class Looks:
    """Notes in a file of each rank what it maps, after a step that all have read before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, info: Any) -> None:
        if (info.event, info.step) == ("step", 3):
            keys = ("Rss", "Pss", "Anonymous")
            text = " ".join(str(mapped_bytes(key)) for key in keys)
            (self.folder / f"rank {info.rank}").write_text(text)
