"""16 trainings on two CPU ranks that are slow for a known reason, and what the doctor says of them.

    python -m tests.doctor.planted [--runs 3] [--only NAME ...]

What a network computes, a store makes wait and so on is mostly a sleep: so its share of a step is
known, whatever else the machine does. A verdict is right if it is the planted one, on the planted
rank, and its share within 20 % (of the planted share, or 5 points of a small one).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import gpupool
from gpupool import ImageDatastore, Pool
from gpupool.training.doctor import Diagnosis
from tests.support.trainings import train_on

BATCH, STEPS = 16, 40  # of both ranks
COMPUTE_S = 0.02  # of forward


def wait(seconds: float, rank: int | None = None) -> None:
    if rank in (None, dist.get_rank()):
        time.sleep(seconds)


class Wait(nn.Module):
    def __init__(self, seconds: float, rank: int | None = None) -> None:
        super().__init__()
        self.seconds, self.rank = seconds, rank

    def forward(self, inputs: Tensor) -> Tensor:
        wait(self.seconds, self.rank)
        return inputs


class SlowBackward(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.requires_grad:
            inputs.register_hook(lambda gradient: wait(COMPUTE_S, 1))
        return inputs


class SlowSamples(Dataset[tuple[Tensor, int]]):
    """Samples that wait, or that compute, for some time each: reading takes as long as forward."""

    def __init__(self, rank: int | None = None, *, computes: bool = False) -> None:
        self.seconds, self.rank, self.computes = COMPUTE_S / (BATCH // 2), rank, computes

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        end = time.perf_counter() + self.seconds
        if not self.computes:
            wait(self.seconds, self.rank)
        while self.computes and time.perf_counter() < end:
            np.linalg.norm(np.ones((32, 32)))
        return torch.zeros(64), index % 3


class SlowOptimizer(torch.optim.SGD):
    """Rank 1 needs longer for its step."""

    def step(self, closure: Any = None) -> Any:
        wait(COMPUTE_S, 1)
        return super().step(closure)


def network(*more: nn.Module, seconds: float = COMPUTE_S, width: int = 32) -> nn.Module:
    first = nn.Sequential(nn.Flatten(), nn.Linear(64, width))
    return nn.Sequential(first, nn.ReLU(), Wait(seconds), *more, nn.Linear(width, 3))


def plain(num_steps: int = STEPS) -> TensorDataset:
    return TensorDataset(torch.randn(BATCH * num_steps, 64), torch.arange(BATCH * num_steps) % 3)


def in_callback(rank: int | None = None) -> Callable[[Any], None]:
    """A callback that takes as long as forward, after each step."""

    def call(info: Any) -> None:
        if info.event == "step":
            wait(COMPUTE_S, rank)

    return call


def item_each_step(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(outputs, targets)
    assert loss.item() >= 0
    return loss


def slow_metric(outputs: Tensor, targets: Tensor) -> Tensor:
    time.sleep(COMPUTE_S)
    return outputs.mean()


def slow_transform(image: Tensor) -> Tensor:
    """10 ms a picture, in the one thread that a rank decodes with."""
    time.sleep(0.01)
    return image[0, :8, :8].float()


def pictures() -> ImageDatastore:
    """As many as there are samples, of noise."""
    folder = Path(tempfile.mkdtemp(prefix="planted-"))
    for number in range(BATCH * STEPS):
        place = folder / f"class{number % 3}"
        place.mkdir(exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 255, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(noise).save(place / f"{number}.png")
    return ImageDatastore(str(folder)).with_transform(slow_transform)


@dataclass(frozen=True)
class Case:
    """A training, and what is to be said of it; `share` 0: as large as it is."""

    name: str
    verdict: str
    share: float = 0.0
    model: Callable[[], nn.Module] = network
    data: Callable[[], Any] = plain
    cause: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def said(self) -> tuple[str, int | None, str]:
        return self.verdict, 1 if self.verdict == "slow rank" else None, self.cause


def cases() -> Iterator[Case]:
    here, often = {"workers": 0}, {"validate_every": 2}
    neighbour = network(Wait(COMPUTE_S, 1))
    wide = network(width=4096, seconds=0.0)[0]  # type: ignore[index]
    large = nn.Sequential(wide, nn.Linear(4096, 12_000), nn.Linear(12_000, 3))
    one, on_one = "slow rank", {"callbacks": [in_callback(1)]}

    def of_one() -> Dataset[Any]:
        return SlowSamples(1)

    def computed() -> Dataset[Any]:
        return SlowSamples(computes=True)

    yield Case("slow store", "data", 0.5, data=SlowSamples, options=here)
    yield Case("slow decode", "data", 0.5, data=computed, options=here)
    yield Case("slow transform", "data", data=pictures)
    yield Case("data of one rank", one, 0.5, data=of_one, cause="data", options=here)
    yield Case("neighbour on one rank", one, 0.5, lambda: neighbour, cause="compute")
    yield Case("backward of one rank", one, 0.5, lambda: network(SlowBackward()), cause="compute")
    yield Case("callback of one rank", one, 0.5, cause="callbacks", options=on_one)
    stepped = {"optimizer": SlowOptimizer}
    yield Case("optimizer of one rank", one, 0.5, cause="optimizer", options=stepped)
    yield Case("200 MB of gradients", "communication", 0.0, lambda: large, lambda: plain(25))
    yield Case("tiny batch", "too small", 0.0, lambda: network(seconds=0.0), lambda: plain(400))
    yield Case("item() each step", "balanced", options={"loss": item_each_step})
    saved = {"checkpoint_every": 1}
    yield Case("checkpoint each step", "saving", 0.0, lambda: network(width=100_000), options=saved)
    validated = {**often, "validation": plain(4)}
    yield Case("validation each 2 steps", "validating", 2 / 3, options=validated)
    measured = {**often, "validation": plain(2), "metrics": [slow_metric]}
    yield Case("slow metric", "validating", 2 / 3, options=measured)
    yield Case("heavy callback", "callbacks", 0.5, options={"callbacks": [in_callback()]})
    yield Case("nothing at all", "balanced")


def examined(case: Case, pool: Pool) -> Diagnosis:
    with tempfile.TemporaryDirectory() as folder:
        options = {"batch_size": BATCH, "epochs": 1, **case.options}
        if "checkpoint_every" in options:
            options["checkpoint"] = folder
        return train_on(pool, case.model(), case.data(), **options).doctor()


def is_right(case: Case, found: Diagnosis) -> bool:
    is_near = abs(found.share - case.share) <= max(0.05, 0.2 * case.share)
    is_same = (found.verdict, found.rank, found.cause) == case.said
    return is_same and (is_near or not case.share)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[])
    asked = parser.parse_args()
    with gpupool.start(n=2, device="cpu") as pool:
        for _ in range(asked.runs):
            rights = []
            print("| planted | share | said | rank | share | right |\n|---|---|---|---|---|---|")
            for case in cases():
                if asked.only and case.name not in asked.only:
                    continue
                found = examined(case, pool)
                rights.append(is_right(case, found))
                planted = f"{case.share:.2f}" if case.share else "-"
                rank = "-" if found.rank is None else f"{found.rank}: {found.cause}"
                right = "yes" if rights[-1] else "no"
                row = (case.name, planted, found.verdict, rank, f"{found.share:.2f}", right)
                print("|", *(f"{cell} |" for cell in row), flush=True)
            print(f"\n{sum(rights)} of {len(rights)} right\n")


if __name__ == "__main__":
    main()
