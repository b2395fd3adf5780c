"""Data sets of one's own, read by gpupool and by DataLoader with its best number of workers.

    python benchmarks/reading.py [--rounds 3] [--workers 0 1 2 4 8 16]

Samples a second in the first epoch (with what has to be started) and in later ones (median), in one
process, interleaved; DataLoader's workers are forked and persist, as gpupool's do. The last column
is gpupool over the best DataLoader.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from gpupool.data.loading import ways
from gpupool.data.loading.ways import load_batches
from gpupool.data.reading.samples import Draw

BATCH = 16
LATER = 3  # epochs that are counted
SETTLING = 30  # epochs at most, before gpupool's processes are there


class Waiting(Dataset[Any]):
    """20 ms of waiting a sample, as for a store."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return torch.full((3, 32, 32), float(index)), index % 10


class Numpy(Dataset[Any]):
    """Signals that numpy filters and sorts."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> Any:
        signal = np.sin(np.arange(4096) * (index + 1) / 100)
        for width in (3, 5, 9, 17):
            signal = np.convolve(signal, np.ones(width) / width, "same")
        peaks = [float(part.max()) for part in np.array_split(np.sort(signal), 256)]
        return torch.tensor(peaks), index % 10


class Tokens(Dataset[Any]):
    """Texts that a tokenizer cuts."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        generator = np.random.default_rng(0)
        words = ["".join(generator.choice(list("abcdefgh"), 6)) for _ in range(500)]
        self.texts = [" ".join(generator.choice(words, 300)) for _ in range(1024)]
        self.tokenizer = Tokenizer(models.BPE(unk_token="?"))
        self.tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["?"], show_progress=False)
        self.tokenizer.train_from_iterator(self.texts[:100], trainer)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(self.tokenizer.encode(self.texts[index]).ids[:256]), index % 2


def pictures(folder: Path) -> ImageFolder:
    """JPEGs of 256 x 256 pixels, with the transforms of most tutorials."""
    generator = np.random.default_rng(0)
    for index in range(256):
        place = folder / str(index % 4)
        place.mkdir(exist_ok=True)
        small = generator.integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(small).resize((256, 256)).save(place / f"{index}.jpg")
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(224),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )
    return ImageFolder(str(folder), transform)


def by_dataloader(dataset: Any, workers: int) -> tuple[float, float]:
    """Seconds of the first epoch, and of later ones."""
    how = {"persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
    loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, **how)
    took = [timed(iter(loader)) for _ in range(1 + LATER)]
    return took[0], statistics.median(took[1:])


def by_gpupool(dataset: Any) -> tuple[float, float, str]:
    """The same, and by what it has read."""
    took, settled = [], 0
    with ways.kept(1000):
        for epoch in range(SETTLING + LATER):
            order = np.random.default_rng(epoch).permutation(len(dataset))
            batches = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
            before = ways.read_by(dataset)
            took.append(timed(load_batches(dataset, batches, draw=Draw(0, epoch))))
            by = ways.read_by(dataset)
            settled = settled + 1 if by == before and by != "1 thread" else 0
            if settled == LATER:
                break
        return took[0], statistics.median(took[-LATER:]), by


def timed(batches: Iterator[Any]) -> float:
    began = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2, 4, 8, 16])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sets: dict[str, Any] = {
            "waiting 20 ms": Waiting(),
            "PIL transforms": pictures(Path(folder)),
            "numpy": Numpy(),
            "tokenizing": Tokens(),
        }
        print(
            "| data | best DataLoader | first, later /s | gpupool | first, later /s | ratio later |"
        )
        print("|---|---|---|---|---|---|", flush=True)
        for name, dataset in sets.items():
            theirs: dict[int, list[tuple[float, float]]] = {n: [] for n in options.workers}
            ours: list[tuple[float, float, str]] = []
            for _ in range(options.rounds):
                for workers, found in theirs.items():
                    found.append(by_dataloader(dataset, workers))
                ours.append(by_gpupool(dataset))
            middle = {n: statistics.median(one[1] for one in found) for n, found in theirs.items()}
            best = min(middle, key=lambda n: middle[n])
            first = statistics.median(one[0] for one in theirs[best])
            own = [statistics.median(one[i] for one in ours) for i in (0, 1)]  # type: ignore[type-var]
            rates = [len(dataset) / took for took in (first, middle[best], *own)]  # type: ignore[operator]
            print(
                f"| {name} | {best} workers | {rates[0]:.0f}, {rates[1]:.0f} | {ours[-1][2]} | "
                f"{rates[2]:.0f}, {rates[3]:.0f} | {rates[3] / rates[1]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
