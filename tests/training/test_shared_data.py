"""Data in memory: one copy for all ranks of a host, sent once, while the notebook has it."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset

import gpupool
from gpupool import Pool
from gpupool.pool.variables.buffers import Buffers
from tests.support.pools import Pools
from tests.support.trainings import train_on, weights

MIB = 1 << 20
NUM, WIDTH = 3000, 1024  # 12 MB, and 4 MB beside it
NUM_BYTES = NUM * WIDTH * 4 + 16 * (1 << 18)
ONE_EPOCH: dict[str, Any] = {"epochs": 1, "batch_size": 300, "lr": 1e-3}


def mapped_bytes(key: str) -> int:
    """Of this process: "Rss", "Pss" or "Anonymous" (copied by a write) of what ranks share."""
    found, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_ours = "/memfd:gpupool" in line
        elif is_ours and line.startswith(f"{key}:"):
            found += int(line.split()[1]) * 1024
    return found


class Arrays:
    """Points in numpy arrays, and a list of tensors; all of them are read with the first sample."""

    def __init__(self, num: int, width: int) -> None:
        self.inputs = np.random.default_rng(0).random((num, width), np.float32)
        self.targets = [torch.tensor(i % 3) for i in range(num)]
        self.extra = [torch.full((1 << 16,), i, dtype=torch.float32) for i in range(16)]
        self.is_read = False

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        if not self.is_read:
            self.is_read = True
            self.inputs.sum() + sum(part.sum() for part in self.extra)
        return self.inputs[index], self.targets[index]


class Looks:
    """Notes in a file of each rank what it maps, after a step that all have read before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, info: Any) -> None:
        if (info.event, info.step) == ("step", 3):
            keys = ("Rss", "Pss", "Anonymous")
            text = " ".join(str(mapped_bytes(key)) for key in keys)
            (self.folder / f"rank {info.rank}").write_text(text)


def num_bytes(kept: Buffers) -> int:
    return sum(num_bytes for num_bytes, _ in kept._stored)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, 3)


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    own = Pools()
    yield own
    own.stop()


@pytest.fixture
def kept(pool2: Pool) -> Buffers:
    gc.collect()  # data sets of tests before this one
    assert num_bytes(pool2.variables.buffers) == 0
    return pool2.variables.buffers


@pytest.mark.long
def test_ranks_share_one_copy_and_the_next_job_sends_nothing(pools: Pools, tmp_path: Path) -> None:
    """The ranks together map as much as one does, by what the kernel counts."""
    data = Arrays(NUM, WIDTH)
    for n in (1, 2, 3):
        (tmp_path / str(n)).mkdir()
        for _ in range(2):
            train_on(pools[n], network(), data, callbacks=Looks(tmp_path / str(n)), **ONE_EPOCH)
        found = [file.read_text().split() for file in (tmp_path / str(n)).iterdir()]
        rss, pss, copied = (sum(int(row[i]) for row in found) for i in range(3))
        assert len(found) == n
        assert rss >= n * NUM_BYTES
        assert pss <= NUM_BYTES + 2 * MIB
        assert copied < MIB
        assert num_bytes(pools[n].variables.buffers) == NUM_BYTES


def test_a_file_that_the_notebook_has_mapped_is_mapped_by_the_ranks(
    pool2: Pool, kept: Buffers, tmp_path: Path
) -> None:
    data = Arrays(60, WIDTH)
    expected = gpupool.predict(network(), data, pool=pool2)
    before = num_bytes(kept)
    np.save(tmp_path / "inputs.npy", data.inputs)
    data.inputs = np.load(tmp_path / "inputs.npy", mmap_mode="r")
    data.is_read = True
    assert torch.equal(gpupool.predict(network(), data, pool=pool2), expected)
    assert num_bytes(kept) == before - 60 * WIDTH * 4
    # A part of it, or one that may differ from its file, is sent as other arrays are.
    for mapped in (data.inputs[5:25], np.load(tmp_path / "inputs.npy", mmap_mode="c")[5:25]):
        data.inputs = mapped
        found = gpupool.predict(network(), data, pool=pool2)
        assert torch.allclose(found, expected[5:25], atol=1e-6)  # others share their batches
        assert num_bytes(kept) == before - 40 * WIDTH * 4


# ---- what pool.put has brought to the ranks -----------------------------------------------------


def test_a_constant_is_a_data_set(pool2: Pool, kept: Buffers) -> None:
    data = Arrays(200, WIDTH)
    result = train_on(pool2, network(), data, validation=data, **ONE_EPOCH)
    expected, losses = weights(result.model), [v.loss for v in result.history.validations]
    outputs = gpupool.predict(result.model, data, pool=pool2)
    values = gpupool.evaluate(result.model, data, pool=pool2)
    constant = pool2.put(data)
    del data, result  # which knows what was validated on: the ranks have the only copy
    gc.collect()
    put = num_bytes(kept)
    found = train_on(pool2, network(), constant, validation=constant, **ONE_EPOCH)
    assert torch.equal(weights(found.model), expected)
    assert [v.loss for v in found.history.validations] == losses
    assert torch.equal(gpupool.predict(found.model, constant, pool=pool2), outputs)
    assert gpupool.evaluate(found.model, constant, pool=pool2) == values
    assert gpupool.confusion(found.model, constant, pool=pool2).num_samples == 200
    part = gpupool.predict(found.model, Subset(constant, range(5)), pool=pool2)
    assert torch.allclose(part, outputs[:5], atol=1e-6)  # in a smaller batch
    assert num_bytes(kept) == put
