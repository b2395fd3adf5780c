"""Data and networks of one's own: text with padding and a ResNet on ImageFolder, beside the peers.

    torchrun --standalone --nproc-per-node=2 -m benchmarks.train_own [--rounds 5]

The same network, data, batches of a rank and optimizer every way, on the CPU, one thread a rank.
Samples are read by the rank's own process or thread every way, as there are two cores. Ways take
turns, in an order that moves on each round. A hook of the network notes when each step begins, and
the CPU time of the process with all its threads: CPU a step is what others disturb least.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH, WARM, STEPS, LR, WORDS = 8, 3, 24, 0.01, 500


class Text(Dataset[Any]):
    """Sentences of 8 to 48 words."""

    def __init__(self, num: int) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(8, 49, (num,), generator=generator).tolist()
        self.rows = [torch.randint(1, WORDS, (n,), generator=generator) for n in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index]}


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch as long as its longest sentence; each word is to predict the next one."""
    words = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = words.roll(-1, 1).masked_fill(words.roll(-1, 1) == 0, -100)
    return {"input_ids": words, "attention_mask": words > 0, "labels": labels}


class Transformer(nn.Module):
    """1.3 M parameters; gives its loss, as networks of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(128, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Any]:
        found = self.layers(self.embed(input_ids), src_key_padding_mask=~attention_mask)
        logits = self.head(found)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Pictures(nn.Module):
    """A ResNet-18 of torchvision that gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models import resnet18

        self.network = resnet18(num_classes=4)

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Any]:
        logits = self.network(pixels)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def stacked(rows: list[Any]) -> dict[str, Tensor]:
    return {
        "pixels": torch.stack([picture for picture, _ in rows]),
        "labels": torch.tensor([label for _, label in rows]),
    }


def folder(num: int, path: Path) -> Dataset[Any]:
    """`num` JPEG files of 4 classes as torchvision's ImageFolder."""
    import numpy as np
    from PIL import Image
    from torchvision import datasets
    from torchvision.transforms import v2

    random = np.random.default_rng(0)
    for index in range(num) if dist.get_rank() == 0 else ():
        place = path / f"class{index % 4}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (96, 96, 3), np.uint8)).save(place / f"{index}.jpg")
    dist.barrier()
    steps = [v2.RandomResizedCrop(64), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    return datasets.ImageFolder(path, v2.Compose(steps))


class Case:
    """What is trained, and when its steps began."""

    def __init__(self, make: Callable[[], nn.Module], data: Any, collate: Any) -> None:
        self.make, self.data, self.collate = make, data, collate
        self.times: list[tuple[float, float]] = []

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.make()
        model.register_forward_pre_hook(self._note)
        return model

    def _note(self, *_: object) -> None:
        self.times.append((time.perf_counter(), time.process_time()))

    def take(self) -> tuple[float, float]:
        """Milliseconds a step after the warm ones: by the wall, of the CPU."""
        times, self.times = self.times[WARM:], []
        (wall, cpu), (wall_end, cpu_end) = times[0], times[-1]
        num = len(times) - 1
        return 1000 * (wall_end - wall) / num, 1000 * (cpu_end - cpu) / num

    def batches(self) -> DataLoader[Any]:
        return DataLoader(self.data, BATCH, shuffle=True, collate_fn=self.collate)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), LR, 0.9)


def raw(case: Case) -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(case.data, seed=1)
    model = DistributedDataParallel(case.model(), gradient_as_bucket_view=True)
    optimizer = sgd(model)
    for batch in DataLoader(case.data, BATCH, sampler=sampler, collate_fn=case.collate):
        optimizer.zero_grad(set_to_none=True)
        model(**batch)["loss"].backward()
        optimizer.step()


def ours(case: Case) -> None:
    from gpupool import TrainingOptions
    from gpupool.engine.group.forming import World
    from gpupool.engine.training.loop import fit

    world = World.here(torch.device("cpu"))
    options = TrainingOptions(
        batch_size=BATCH * world.size, lr=LR, epochs=1, collate=case.collate, workers=0
    )
    fit(case.model(), case.data, "output", options, world=world)


def accelerate(case: Case) -> None:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), case.model()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), case.batches())
    for batch in batches:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()


def lightning(case: Case) -> None:
    import pytorch_lightning as package

    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = case.model()

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss: Tensor = self.network(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    package.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.gettempdir(),
    ).fit(Module(), case.batches())


def hugging_face(case: Case) -> None:
    import transformers

    model = case.model()
    asked = transformers.TrainingArguments(
        output_dir=tempfile.gettempdir(),
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        max_grad_norm=0.0,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        logging_strategy="no",
    )
    transformers.Trainer(
        model, asked, case.collate, case.data, optimizers=(sgd(model), None)
    ).train()


WAYS: dict[str, Callable[[Case], None]] = {
    "raw DDP": raw,
    "raw DDP, again (noise)": raw,
    "gpupool, fit() under torchrun": ours,
    "Accelerate": accelerate,
    "Lightning Trainer, bare": lightning,
    "Hugging Face Trainer": hugging_face,
}


def measure(case: Case, rounds: int) -> dict[str, list[tuple[float, float, float]]]:
    """By way: (wall ms a step, CPU ms a step, seconds of all) of each round but the first."""
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    names = list(WAYS)
    for number in range(rounds + 1):
        turn = number % len(names)
        for way in names[turn:] + names[:turn]:
            dist.barrier()
            began = time.perf_counter()
            WAYS[way](case)
            took = (*case.take(), time.perf_counter() - began)
            if number:  # the first round warms everything
                found[way].append(took)
    return found


def report(name: str, found: dict[str, list[tuple[float, float, float]]]) -> None:
    print(f"\n## {name}: {BATCH} samples a rank, {dist.get_world_size()} ranks\n")
    print("| way | CPU ms a step | of raw | wall ms a step | of raw | whole, s |")
    print("|---|---|---|---|---|---|")
    base = [statistics.median(column) for column in zip(*found["raw DDP"], strict=True)]
    for way, rows in found.items():
        wall, cpu, whole = (statistics.median(column) for column in zip(*rows, strict=True))
        ratios = f"{cpu:.1f} | {cpu / base[1]:.2f} | {wall:.1f} | {wall / base[0]:.2f}"
        print(f"| {way} | {ratios} | {whole:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Data and networks of one's own.")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    num = BATCH * dist.get_world_size() * (WARM + STEPS + 1)
    path = Path(tempfile.gettempdir(), f"gpupool-bench-{os.environ['TORCHELASTIC_RUN_ID']}")
    for name, case in (
        ("text", Case(Transformer, Text(num), padded)),
        ("ImageFolder", Case(Pictures, folder(num, path), stacked)),
    ):
        found = measure(case, chosen.rounds)
        if dist.get_rank() == 0:
            report(name, found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
