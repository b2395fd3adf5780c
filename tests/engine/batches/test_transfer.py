"""Batches are brought to the device aside, taken before use, and not more than two steps ahead."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from gpupool import DataError, TrainingOptions
from gpupool.data import device as devices
from gpupool.data.reading.samples import Draw
from gpupool.engine.batches.map_style import load_shares
from gpupool.engine.batches.shares import epoch_shares
from gpupool.engine.batches.transfer import transfer
from gpupool.engine.group.forming import World
from tests.engine.batches.streams import Stream, points
from tests.support.beside import watched

CPU = torch.device("cpu")
WORLD = World(0, 1, CPU)
NUM_BATCHES = 6


def batches(data: Any) -> Any:
    if isinstance(data, TensorDataset):
        order = np.array_split(np.arange(len(data)), NUM_BATCHES)
        return load_shares(data, order, WORLD, Draw(0, 1))
    options = TrainingOptions(batch_size=4, shuffle="never")
    return epoch_shares(data, options, WORLD, 1)


@pytest.mark.parametrize("streams", [False, True])
def test_each_batch_is_brought_aside_and_taken_by_the_thread_that_uses_it(streams: bool) -> None:
    num = 4 * NUM_BATCHES
    inputs, targets = map(torch.stack, zip(*points(num), strict=True))
    data: Any = Stream(num) if streams else TensorDataset(inputs, targets)
    with watched() as cpu:
        found, held = [], []
        for share in batches(data):
            found.append((share.inputs.clone(), share.targets.clone()))  # poison, if not taken
            held.append(cpu.num_marks - len(cpu.reached))
    assert torch.equal(torch.cat([one for one, _ in found]), inputs)
    assert torch.equal(torch.cat([one for _, one in found]), targets)
    steps = {threading.current_thread().name: ["hand over", "take"] * NUM_BATCHES}
    assert cpu.steps == steps
    assert (cpu.num_streams, max(held)) == (1, 2)
    assert cpu.reached == [*range(1, len(cpu.reached) + 1)]  # in order, the oldest first


def test_a_half_without_a_tensor_is_named_and_the_stream_is_left() -> None:
    with watched() as cpu:
        for _ in range(2):
            with transfer(CPU) as on_way, pytest.raises(DataError, match="targets"):
                on_way.bring(inputs=torch.ones(1), targets=["a"])
        assert cpu.num_streams == 1  # and the next reading has it
        assert devices.of(CPU) is cpu
