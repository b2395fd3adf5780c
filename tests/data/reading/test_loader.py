"""Batches in order, read here or ahead by one thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from gpupool.core.errors import DataError
from gpupool.data.reading.loader import load_batches
from gpupool.data.reading.rows import Reading
from gpupool.data.reading.threads import read_ahead
from tests.data.reading.points import TIMEOUT_S, Points, full, join_loaders, num_threads


class Squares:
    """Sample i is (float tensor [i], i * i); `gate` holds back everything from `closed_from` on."""

    def __init__(self, closed_from: int = 10**9) -> None:
        self.closed_from = closed_from
        self.gate, self.reached = threading.Event(), threading.Event()
        self.read: list[int] = []

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.read.append(index)
        if index >= self.closed_from:
            self.reached.set()
            assert self.gate.wait(TIMEOUT_S)
        if index == 13:
            raise DataError("sample 13 is bad")
        return torch.tensor([float(index)]), index * index


def batches(*lists: list[int]) -> list[np.ndarray]:
    return [np.array(one, dtype=np.int64) for one in lists]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    join_loaders()


@pytest.mark.parametrize("depth", [0, 2])
def test_batches_and_errors_come_in_order(depth: int) -> None:
    data = Squares()
    assert list(load_batches(data, [], depth=depth)) == []
    loading = load_batches(data, batches([], [5, 4], [], [13], [9]), depth=depth)
    assert (next(loading), num_threads()) == (None, 0)
    first = next(loading)
    assert first is not None
    assert (first.inputs.tolist(), first.targets.tolist(), first.num) == ([[5], [4]], [25, 16], 2)
    assert next(loading) is None
    assert depth or data.read == [5, 4]
    with pytest.raises(DataError, match="sample 13"):
        next(loading)
    assert list(loading) == []


@pytest.mark.parametrize("depth", [1, 5])
def test_a_thread_is_ahead_but_not_further_than_asked(depth: int) -> None:
    dataset = Squares(closed_from=1 + depth)
    loading = read_ahead((dataset[i] for i in range(10)), Reading(depth=depth))
    next(loading)  # now 1..depth are read without being asked for
    next(loading)  # and one more may start: it waits at the gate
    assert dataset.reached.wait(TIMEOUT_S)
    assert dataset.read == list(range(depth + 2))
    loading.close()  # which does not wait for it
    assert not dataset.gate.is_set()
    dataset.gate.set()
    join_loaders()
    assert dataset.read == list(range(depth + 2))


@pytest.mark.gpu
@pytest.mark.parametrize("dataset", [Squares(), Points(4)])
def test_batches_for_a_gpu_are_pinned(dataset: Any) -> None:
    loaded = full(load_batches(dataset, batches([0, 1], [2]), device="cuda"))
    assert all(batch.inputs.is_pinned() and batch.targets.is_pinned() for batch in loaded)


class Unknown(TensorDataset):
    """As `TensorDataset`, but nobody can know what its `__getitem__` does."""


@pytest.mark.parametrize("width", [8, 40_000], ids=["read at once", "read ahead"])
def test_tensors_in_memory_are_cut_into_the_batches_that_collating_gives(width: int) -> None:
    tensors = torch.rand(10, width, generator=torch.Generator()), torch.arange(10)
    order = batches([3, 1, 4], [1, 5, 9, 2])
    ours, theirs = (full(load_batches(kind(*tensors), order)) for kind in (TensorDataset, Unknown))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)
        assert (one.num, one.skipped) == (other.num, other.skipped)
