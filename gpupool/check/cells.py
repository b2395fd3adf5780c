"""What the ranks do for a check. Runs on ranks.

They ask torch itself what a device does and has: what is checked must not be what checks.
"""

from __future__ import annotations

import os
import time
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn


def rank_device() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def devices_seen() -> tuple[int, str, int]:
    """How many GPUs this process sees, the UUID of the first one ("" without), and its threads."""
    device = rank_device()
    if device.type == "cpu":
        return 0, "", torch.get_num_threads()
    properties = torch.get_device_module(device).get_device_properties(0)
    return torch.accelerator.device_count(), str(properties.uuid), torch.get_num_threads()


def group_seen() -> tuple[str, str]:
    """The back ends of the group, and the class that sums tensors of this rank's device."""
    world: Any = dist.group.WORLD
    return dist.get_backend_config(), type(world._get_backend(rank_device())).__name__


def sums(num_mib: int) -> tuple[list[str], float]:
    """The number formats that `all_reduce` sums wrongly; GB/s, as NCCL's own tests count them:
    what each rank has to send and receive."""
    device, rank, size = rank_device(), dist.get_rank(), dist.get_world_size()
    wrong = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8):
        base = torch.arange(1000, device=device) % 7
        x = (base + rank % 3).to(dtype)
        dist.all_reduce(x)
        expected = (base * size + sum(r % 3 for r in range(size))).to(dtype)
        if not torch.equal(x, expected):
            wrong.append(str(dtype))
    big = torch.zeros(num_mib << 18, device=device)  # zeros stay finite, however often summed
    for _ in range(3):
        dist.all_reduce(big)
    finish(device)
    began = time.perf_counter()
    for _ in range(10):
        dist.all_reduce(big)
    finish(device)
    each_s = (time.perf_counter() - began) / 10
    return wrong, big.nbytes / each_s / 1e9 * 2 * (size - 1) / size


def queue_work() -> float:
    """Give a GPU about a second of work and wait for none of it; seconds this has taken."""
    device = rank_device()
    size = 4096 if device.type != "cpu" else 256
    product = matrix = torch.rand(size, size, device=device) / size
    began = time.perf_counter()
    for _ in range(300):
        product = product @ matrix
    return time.perf_counter() - began


def seconds_to_finish() -> float:
    began = time.perf_counter()
    finish(rank_device())
    return time.perf_counter() - began


def free_memory() -> int:
    """Bytes that other tensors could have on this rank's GPU, or on the host."""
    device = rank_device()
    if device.type == "cpu":
        return -int(psutil.Process().memory_info().rss)  # of the others nobody knows what they do
    torch.accelerator.empty_cache()
    return int(torch.get_device_module(device).mem_get_info()[0])


def break_rank() -> None:
    """Lose the context of the GPU by an assertion of a kernel; without a GPU, end the process."""
    device = rank_device()
    if device.type == "cpu":
        os._exit(3)  # as a native library does that calls exit()
    torch.zeros(2, device=device)[torch.tensor([5], device=device)].cpu()


def train_alone(model: nn.Module, data: Any, size: int, epochs: int, lr: float) -> nn.Module:
    """The network after plain SGD with momentum on this rank alone, over the samples in order."""
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
