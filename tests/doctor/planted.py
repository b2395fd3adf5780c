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
from gpupool import ImageDatastore, Pool, TrainingOptions
from gpupool.training.doctor import Diagnosis, diagnose
from gpupool.training.run import TrainingRun

BATCH, STEPS = 16, 40  # of both ranks
COMPUTE_S = 0.02  # of forward


def wait(seconds: float, rank: int | None = None) -> None:
    """On this rank, or on all."""
    if rank in (None, dist.get_rank()):
        time.sleep(seconds)


class Wait(nn.Module):
    """Passes its input on, after a while."""

    def __init__(self, seconds: float, rank: int | None = None) -> None:
        super().__init__()
        self.seconds, self.rank = seconds, rank

    def forward(self, inputs: Tensor) -> Tensor:
        wait(self.seconds, self.rank)
        return inputs


class _WaitBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        wait(COMPUTE_S, 1)
        return gradients[0]


class SlowBackward(nn.Module):
    """Rank 1 is slow where gradients are computed."""

    def forward(self, inputs: Tensor) -> Tensor:
        passed: Tensor = _WaitBackward.apply(inputs)
        return passed


class SlowSamples(Dataset[tuple[Tensor, int]]):
    """Samples that wait, or that compute, for some time each."""

    def __init__(self, seconds: float, rank: int | None = None, *, computes: bool = False) -> None:
        self.seconds, self.rank, self.computes = seconds, rank, computes

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
    """A classifier of 64 numbers that computes for so long."""
    first = nn.Sequential(nn.Flatten(), nn.Linear(64, width))
    return nn.Sequential(first, nn.ReLU(), Wait(seconds), *more, nn.Linear(width, 3))


def plain(num_steps: int = STEPS) -> TensorDataset:
    """Data that are there at once."""
    return TensorDataset(torch.randn(BATCH * num_steps, 64), torch.arange(BATCH * num_steps) % 3)


def in_callback(rank: int | None = None) -> Callable[[Any], None]:
    """A callback that takes as long as forward, after each step."""

    def call(info: Any) -> None:
        if info.event == "step":
            wait(COMPUTE_S, rank)

    return call


def item_each_step(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that is read from the device in each step."""
    loss = nn.functional.cross_entropy(outputs, targets)
    assert loss.item() >= 0
    return loss


def slow_metric(outputs: Tensor, targets: Tensor) -> Tensor:
    """A metric that takes as long as forward."""
    time.sleep(COMPUTE_S)
    return outputs.mean()


def slow_transform(image: Tensor) -> Tensor:
    """10 ms a picture, in the one thread that a rank decodes with."""
    time.sleep(0.01)
    return image[0, :8, :8].float()


@dataclass(frozen=True)
class Case:
    """A training, and what is to be said of it; `share` 0: as large as it is."""

    name: str
    verdict: str
    share: float = 0.0
    model: Callable[[], nn.Module] = network
    data: Callable[[], Any] = plain
    rank: int | None = None
    cause: str = ""
    loss: Any = "cross_entropy"
    options: dict[str, Any] = field(default_factory=dict)
    validation: Callable[[], Any] = lambda: None


def pictures() -> ImageDatastore:
    """As many as there are samples, of noise."""
    folder = Path(tempfile.mkdtemp(prefix="planted-"))
    for number in range(BATCH * STEPS):
        place = folder / f"class{number % 3}"
        place.mkdir(exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 255, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(noise).save(place / f"{number}.png")
    return ImageDatastore(str(folder)).with_transform(slow_transform)


def cases() -> Iterator[Case]:
    """All 16."""
    here, sample_s = {"workers": 0}, COMPUTE_S / (BATCH // 2)  # so reading takes as long as forward
    one: dict[str, Any] = {"verdict": "slow rank", "rank": 1, "share": 0.5}
    wide = network(width=4096, seconds=0.0)[0]  # type: ignore[index]
    large = nn.Sequential(wide, nn.Linear(4096, 12_000), nn.Linear(12_000, 3))
    often: dict[str, Any] = {"verdict": "validating", "share": 2 / 3}

    def own(**how: Any) -> Callable[[], Any]:
        return lambda: SlowSamples(sample_s, **how)

    yield Case("slow store", "data", 0.5, data=own(), options=here)
    yield Case("slow decode", "data", 0.5, data=own(computes=True), options=here)
    yield Case("slow transform", "data", data=pictures)
    yield Case("data of one rank", **one, cause="data", data=own(rank=1), options=here)
    neighbour = network(Wait(COMPUTE_S, 1))
    yield Case("neighbour on one rank", **one, cause="compute", model=lambda: neighbour)
    yield Case(
        "backward of one rank", **one, cause="compute", model=lambda: network(SlowBackward())
    )
    yield Case(
        "callback of one rank",
        **one,
        cause="callbacks",
        options={"callbacks": [in_callback(1)]},
    )
    yield Case(
        "optimizer of one rank", **one, cause="optimizer", options={"optimizer": SlowOptimizer}
    )
    yield Case("200 MB of gradients", "communication", model=lambda: large, data=lambda: plain(25))
    yield Case(
        "tiny batch", "too small", model=lambda: network(seconds=0.0), data=lambda: plain(400)
    )
    yield Case("item() each step", "balanced", loss=item_each_step)
    yield Case(
        "checkpoint each step",
        "saving",
        model=lambda: network(width=100_000),
        options={"checkpoint_every": 1},
    )
    yield Case(
        "validation each 2 steps",
        **often,
        options={"validate_every": 2},
        validation=lambda: plain(4),
    )
    yield Case(
        "slow metric",
        **often,
        options={"validate_every": 2, "metrics": [slow_metric]},
        validation=lambda: plain(2),
    )
    yield Case("heavy callback", "callbacks", 0.5, options={"callbacks": [in_callback()]})
    yield Case("nothing at all", "balanced")


def examined(case: Case, pool: Pool) -> Diagnosis:
    """What the doctor says of the training of a case."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"progress": "none", "batch_size": BATCH, "epochs": 1, **case.options}
        if "checkpoint_every" in options:
            options["checkpoint"] = folder
        run = TrainingRun(
            pool,
            case.model(),
            case.data(),
            case.loss,
            TrainingOptions(**options),
            case.validation(),
        )
        return diagnose(run.result().history)


def is_right(case: Case, found: Diagnosis) -> bool:
    """Whether it is what was planted."""
    is_same = (found.verdict, found.rank, found.cause) == (case.verdict, case.rank, case.cause)
    return is_same and (
        not case.share or abs(found.share - case.share) <= max(0.05, 0.2 * case.share)
    )


def main() -> None:
    """All cases, so many times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[])
    asked = parser.parse_args()
    with gpupool.start(n=2, device="cpu") as pool:
        for _ in range(asked.runs):
            num_right = num = 0
            print("| planted | share | said | rank | share | right |\n|---|---|---|---|---|---|")
            for case in cases():
                if asked.only and case.name not in asked.only:
                    continue
                found = examined(case, pool)
                right = is_right(case, found)
                num_right, num = num_right + right, num + 1
                planted = f"{case.share:.2f}" if case.share else "-"
                rank = "-" if found.rank is None else f"{found.rank}: {found.cause}"
                row = (case.name, planted, found.verdict, rank, f"{found.share:.2f}")
                print("|", *(f"{cell} |" for cell in row), "yes |" if right else "no |", flush=True)
            print(f"\n{num_right} of {num} right\n")


if __name__ == "__main__":
    main()
