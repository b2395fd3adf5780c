"""What the ranks do for a check: sent there as a user's functions are. Runs on ranks.

They ask torch itself what a device does and has: what is checked must not be what checks.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

MIB = 1 << 20


def rank_device() -> torch.device:
    """The GPU that this rank sees, or the CPU."""
    import torch

    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def finish(device: torch.device) -> None:
    """Wait until the device has computed what it was given."""
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize()


def devices_seen() -> tuple[int, str, int]:
    """How many GPUs this process sees, the UUID of the first one ("" without), and its threads."""
    import torch

    device, number = rank_device(), 0
    uuid = ""
    if device.type != "cpu":
        number = torch.accelerator.device_count()
        uuid = str(torch.get_device_module(device).get_device_properties(0).uuid)
    return number, uuid, torch.get_num_threads()


def group_seen() -> tuple[str, str]:
    """The back ends of the group, and the class that sums tensors of this rank's device."""
    import torch.distributed as dist

    world: Any = dist.group.WORLD
    return dist.get_backend_config(), type(world._get_backend(rank_device())).__name__


def sums(num_bytes: int) -> tuple[list[str], float]:
    """The number formats that `all_reduce` sums wrongly; the GB/s of the algorithm."""
    import torch
    import torch.distributed as dist

    device, rank, size = rank_device(), dist.get_rank(), dist.get_world_size()
    wrong = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8):
        base = torch.arange(1000, device=device) % 7
        x = (base + rank % 3).to(dtype)
        dist.all_reduce(x)
        expected = (base * size + sum(r % 3 for r in range(size))).to(dtype)
        if not torch.equal(x, expected):
            wrong.append(str(dtype))
    big = torch.zeros(num_bytes // 4, device=device)  # zeros stay finite, however often summed
    for _ in range(3):
        dist.all_reduce(big)
    finish(device)
    began = time.perf_counter()
    for _ in range(10):
        dist.all_reduce(big)
    finish(device)
    return wrong, 10 * big.nbytes / (time.perf_counter() - began) / 1e9


# ---- faults ------------------------------------------------------------------------------------


def queue_work(wanted_s: float) -> float:
    """Give the device work for about so long and wait for none of it; seconds this has taken."""
    import torch

    device = rank_device()
    size = 4096 if device.type != "cpu" else 256
    matrix = torch.rand(size, size, device=device) / size
    for _ in range(2):  # the first one loads kernels
        finish(device)
        began = time.perf_counter()
        product = matrix @ matrix
        finish(device)
        each_s = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(max(1, int(wanted_s / each_s))):
        product = product @ matrix
    return time.perf_counter() - began


def seconds_to_finish() -> float:
    """How long the device still computes what it was given before."""
    device = rank_device()
    began = time.perf_counter()
    finish(device)
    return time.perf_counter() - began


def free_memory() -> int:
    """Bytes that other tensors could have on this rank's GPU, or on the host."""
    import psutil
    import torch

    device = rank_device()
    if device.type == "cpu":
        return -int(psutil.Process().memory_info().rss)  # of the others nobody knows what they do
    torch.accelerator.empty_cache()
    return int(torch.get_device_module(device).mem_get_info()[0])


def break_rank() -> None:
    """Lose the context of the GPU by an assertion of a kernel; without a GPU, end the process."""
    import torch

    device = rank_device()
    if device.type == "cpu":
        os._exit(3)  # as a native library does that calls exit()
    torch.zeros(2, device=device)[torch.tensor([5], device=device)].cpu()


# ---- numbers -----------------------------------------------------------------------------------


def train_alone(model: nn.Module, data: Any, size: int, epochs: int, lr: float) -> nn.Module:
    """The network after plain SGD with momentum on this rank alone, over the samples in order."""
    import torch

    device = rank_device()
    model = model.to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    inputs, targets = (tensor.to(device) for tensor in data.tensors)
    for _ in range(epochs):
        for begin in range(0, len(inputs), size):
            batch = slice(begin, begin + size)
            loss = torch.nn.functional.cross_entropy(model(inputs[batch]), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.cpu()


def train_by_hand(per_rank: int, size: int, steps: int) -> float:
    """Images a second of a plain DDP loop with ResNet-18 on this rank; in bf16 on a GPU."""
    import torch
    import torchvision
    from torch.nn.parallel import DistributedDataParallel

    device = rank_device()
    on_gpu = device.type != "cpu"
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10).to(device)
    model = model.to(memory_format=torch.channels_last)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.01, momentum=0.9, fused=on_gpu)
    images = torch.randint(0, 256, (per_rank * 10, 3, size, size), dtype=torch.uint8)
    labels = torch.randint(0, 10, (per_rank * 10,))
    criterion = torch.nn.CrossEntropyLoss()
    warm, began = steps // 4, 0.0
    for number in range(steps):
        if number == warm:
            finish(device)
            began = time.perf_counter()
        rows = torch.randperm(len(images))[:per_rank]
        x, y = images[rows], labels[rows]
        if on_gpu:
            x, y = x.pin_memory(), y.pin_memory()
        x = x.to(device, non_blocking=True).float().div_(255)
        x = x.contiguous(memory_format=torch.channels_last)
        y = y.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = criterion(parallel(x), y)
        loss.backward()
        optimizer.step()
    finish(device)
    return (steps - warm) * per_rank / (time.perf_counter() - began)
