"""ResNet-50 on one GPU, bf16, channels-last, compiled: `fit()` beside a script tuned by hand.

    python -m benchmarks.train_gpu [--rounds 3] [--steps 150] [--batch 256]

Both take turns in one process, with the same images in the host's memory as uint8: batches are
copied from pinned memory while the GPU computes, and made float there. Images a second are those
of the last two thirds of a round, between two synchronisations of the device.
`--device cpu --batch 4 --steps 6 --model resnet18` shows that the script runs, and nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from gpupool import TrainingOptions
from gpupool.core.wire.events import Event, StepEvent
from gpupool.engine.group.forming import World
from gpupool.engine.training.loop import fit

LR, MOMENTUM, DECAY = 0.1, 0.9, 1e-4


def by_hand(
    model: nn.Module, data: TensorDataset, batch: int, steps: int, device: torch.device
) -> float:
    """Images a second of the loop that one would write for this GPU."""
    model = model.to(device, memory_format=torch.channels_last).train()
    model.compile()
    optimizer = torch.optim.SGD(
        model.parameters(), LR, MOMENTUM, weight_decay=DECAY, fused=device.type == "cuda"
    )
    warm, began = steps // 3, 0.0
    for step, (images, labels) in enumerate(ahead(data, batch, steps, device), start=1):
        inputs = images.float().div_(255).contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16):
            loss = functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step == warm:
            began = finished(device)
    return batch * (steps - warm) / (finished(device) - began)


def ahead(
    data: TensorDataset, batch: int, steps: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled batches, the next one on its way to the GPU while this one is used."""
    images, labels = data.tensors
    on_gpu = device.type == "cuda"
    stream = torch.cuda.Stream() if on_gpu else None
    order = torch.cat([torch.randperm(len(images)) for _ in range(-(-steps * batch // len(data)))])

    def load(number: int) -> tuple[Tensor, Tensor]:
        index = order[number * batch : (number + 1) * batch]
        pair = images[index], labels[index]
        if not on_gpu:
            return pair
        with torch.cuda.stream(stream):
            return tuple(one.pin_memory().to(device, non_blocking=True) for one in pair)

    following = load(0)
    for number in range(steps):
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
            for one in following:
                one.record_stream(torch.cuda.current_stream())
        present = following
        if number + 1 < steps:
            following = load(number + 1)
        yield present


def by_fit(
    model: nn.Module, data: TensorDataset, batch: int, steps: int, device: torch.device
) -> float:
    """Images a second of gpupool's loop, all reports on."""
    times: dict[int, float] = {}

    def take(events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, StepEvent):
                times[event.step] = event.elapsed_s

    options = TrainingOptions(
        lr=LR,
        momentum=MOMENTUM,
        weight_decay=DECAY,
        batch_size=batch,
        epochs=-(-steps * batch // len(data)),
        max_steps=steps,
        precision="bf16",
        channels_last=True,
        compile=True,
        on_divergence="tell",
    )
    began = time.perf_counter()  # from where the events count their seconds
    fit(model, data, "cross_entropy", options, world=World(0, 1, device), emit=take)
    end = finished(device) - began
    warm = steps // 3
    return batch * (steps - warm) / (end - times[warm])


def finished(device: torch.device) -> float:
    """The time at which the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    num = asked.batch * 16
    data = TensorDataset(
        torch.randint(0, 256, (num, 3, 224, 224), dtype=torch.uint8), torch.randint(0, 1000, (num,))
    )
    rates: dict[str, list[float]] = {"by hand": [], "gpupool, fit()": []}
    for _ in range(asked.rounds):
        for name, way in (("by hand", by_hand), ("gpupool, fit()", by_fit)):
            torch.manual_seed(0)
            model = torchvision.models.get_model(asked.model)
            rates[name].append(way(model, data, asked.batch, asked.steps, device))
    base = statistics.median(rates["by hand"])
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{asked.model}, batch {asked.batch}, bf16, channels-last, compiled, {where}\n")
    print("| way | images/s, median | of the script by hand |\n|---|---|---|")
    for name, found in rates.items():
        print(
            f"| {name} | {statistics.median(found):.0f} | {statistics.median(found) / base:.3f} |"
        )


if __name__ == "__main__":
    main()
