"""The ways to train that run under torchrun, and the ranks that try them on demand.

Ranks are started once by `benchmarks.train`; for each line on rank 0's pipe ("tiny raw DDP") all of
them train that way and rank 0 answers with a line of JSON.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.train_clock import CASES, Case, take_last

LR, MOMENTUM, DECAY = 0.01, 0.9, 1e-4


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), LR, MOMENTUM, weight_decay=DECAY)


def loader(case: Case, data: TensorDataset) -> DataLoader[Any]:
    """Each rank's batches, as one writes it."""
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=1)
    return DataLoader(data, batch_size=case.batch, sampler=sampler)


def shuffled(case: Case, data: TensorDataset) -> DataLoader[Any]:
    """What the peers make ready for several ranks themselves."""
    return DataLoader(data, batch_size=case.batch, shuffle=True)


def raw(case: Case, data: TensorDataset) -> None:
    model = DistributedDataParallel(case.model(), gradient_as_bucket_view=True)
    optimizer = sgd(model)
    for inputs, targets in loader(case, data):
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def fit(case: Case, data: TensorDataset) -> None:
    from gpupool.engine.group.forming import World
    from gpupool.engine.training import loop

    events: list[Any] = []
    world = World.here(torch.device("cpu"))
    options = our_options(case, world.size)
    loop.fit(case.model(), data, "cross_entropy", options, world=world, emit=events.extend)


def our_options(case: Case, world_size: int) -> Any:
    from gpupool import TrainingOptions

    return TrainingOptions(
        batch_size=case.batch * world_size,
        lr=LR,
        momentum=MOMENTUM,
        weight_decay=DECAY,
        epochs=1,
    )


def accelerate(case: Case, data: TensorDataset) -> None:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), case.model()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), shuffled(case, data))
    for inputs, targets in batches:
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


def fabric(case: Case, data: TensorDataset) -> None:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    model = case.model()
    wrapped, optimizer = fabric.setup(model, sgd(model))
    for inputs, targets in fabric.setup_dataloaders(shuffled(case, data)):
        fabric.backward(cross_entropy(wrapped(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


def trainer(*, logs: bool) -> Callable[[Case, TensorDataset], None]:
    """Lightning's Trainer: bare, or with the loss logged and shown in the bar, as is usual."""

    def train(case: Case, data: TensorDataset) -> None:
        import pytorch_lightning

        class Module(pytorch_lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.network = case.model()

            def training_step(self, batch: Any, number: int) -> Tensor:
                loss = cross_entropy(self.network(batch[0]), batch[1])
                if logs:
                    self.log("loss", loss, prog_bar=True, on_step=True)
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return sgd(self)

        stdout, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115
        try:
            pytorch_lightning.Trainer(
                accelerator="cpu",
                devices=dist.get_world_size(),
                strategy="ddp",
                max_epochs=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=logs,
                enable_model_summary=False,
                default_root_dir=tempfile.gettempdir(),
            ).fit(Module(), shuffled(case, data))
        finally:
            sys.stdout = stdout

    return train


WAYS: dict[str, Callable[[Case, TensorDataset], None]] = {
    "raw DDP": raw,
    "raw DDP, again (noise)": raw,
    "gpupool, fit() under torchrun": fit,
    "Accelerate": accelerate,
    "Lightning Fabric": fabric,
    "Lightning Trainer, bare": trainer(logs=False),
    "Lightning Trainer, usual": trainer(logs=True),
}


def serve(asked: TextIO, answers: TextIO) -> None:
    """Try the ways that rank 0 is asked for, until there is no more."""
    data: dict[str, TensorDataset] = {}
    while True:
        line = [asked.readline().strip() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(line)
        if not line[0]:
            return
        name, way = line[0].split(" ", 1)
        case = CASES[name]
        if name not in data:
            data[name] = case.data(dist.get_world_size())
        dist.barrier()
        began = time.time()
        WAYS[way](case, data[name])
        if dist.get_rank() == 0:
            answers.write(json.dumps({"began": began, **asdict(take_last())}) + "\n")
            answers.flush()
        else:
            take_last()


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)  # of Lightning
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    asked_path, answers_path = sys.argv[1:]
    if dist.get_rank() == 0:
        with open(asked_path) as asked, open(answers_path, "w") as answers:
            serve(asked, answers)
    else:
        serve(sys.stdin, sys.stdout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
