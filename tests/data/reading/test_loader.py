"""Batches in order, read here or ahead by one thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from gpupool.core.errors import DataError, SampleError
from gpupool.data.reading.loader import load_batches
from gpupool.data.reading.rows import Reading
from gpupool.data.reading.threads import read_ahead
from tests.data.reading.points import TIMEOUT_S, Points, first, full, join_loaders, num_threads

ROOT = Path(__file__).parents[3]


class Squares:
    """Sample i is (float tensor [i], i * i); `gate` holds back everything from `closed_from` on."""

    def __init__(self, closed_from: int = 10**9) -> None:
        self.closed_from = closed_from
        self.gate = threading.Event()
        self.reached = threading.Event()
        self.read: list[int] = []
        self.by: set[threading.Thread] = set()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.read.append(index)
        self.by.add(threading.current_thread())
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


def test_batches_come_in_order_collated() -> None:
    wanted = batches([0, 1, 2], [5, 4], [9])
    loaded = full(load_batches(Squares(), wanted))
    assert [batch.inputs.tolist() for batch in loaded] == [[[0], [1], [2]], [[5], [4]], [[9]]]
    assert [batch.targets.tolist() for batch in loaded] == [[0, 1, 4], [25, 16], [81]]
    assert [batch.num for batch in loaded] == [3, 2, 1]
    assert not loaded[0].inputs.is_pinned()


def test_no_batches_and_empty_batches() -> None:
    assert list(load_batches(Squares(), [])) == []
    loaded = list(load_batches(Squares(), batches([], [1], [])))
    assert [batch is None for batch in loaded] == [True, False, True]


@pytest.mark.parametrize("depth", [1, 2, 5])
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


def test_without_depth_the_callers_thread_reads_each_batch_when_asked() -> None:
    data = Squares()
    loading = load_batches(data, batches([0], [], [1, 13]), depth=0)
    assert first(loading)[1].tolist() == [0]
    assert (data.read, num_threads()) == ([0], 0)
    assert next(loading) is None
    with pytest.raises(DataError, match="sample 13"):
        next(loading)
    assert data.by == {threading.current_thread()}


def test_an_error_comes_out_at_its_own_batch() -> None:
    loading = load_batches(Squares(), batches([11], [12], [13], [14]))
    assert [first(loading)[1].item(), first(loading)[1].item()] == [121, 144]
    with pytest.raises(DataError, match="sample 13 is bad"):
        next(loading)
    assert list(loading) == []


def test_dropping_the_iterator_ends_the_thread() -> None:
    dataset = Squares()
    for _ in read_ahead((dataset[i] for i in range(9)), Reading()):
        break
    join_loaders()


@pytest.mark.gpu
@pytest.mark.parametrize("dataset", [Squares(), Points(4)])
def test_batches_for_a_gpu_are_pinned(dataset: Any) -> None:
    loaded = full(load_batches(dataset, batches([0, 1], [2]), device="cuda"))
    assert all(batch.inputs.is_pinned() and batch.targets.is_pinned() for batch in loaded)


def test_samples_of_other_data_sets_are_skipped_too() -> None:
    class Some(Squares):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[index] for index in indices]

        def __getitem__(self, index: int) -> Any:
            if index % 4 == 1:
                raise SampleError("bad", f"some/{index}", "damaged")
            return super().__getitem__(index)

    for dataset in (Some(), Squares()):
        loaded = full(load_batches(dataset, batches([0, 1, 2], [4, 5]), skip=True))
        expected = [[0, 4], [16]] if isinstance(dataset, Some) else [[0, 1, 4], [16, 25]]
        assert [batch.targets.tolist() for batch in loaded] == expected


class Unknown(TensorDataset):
    """As `TensorDataset`, but nobody can know what its `__getitem__` does."""


@pytest.mark.parametrize("width", [8, 40_000], ids=["read at once", "read ahead"])
def test_tensors_in_memory_are_cut_into_the_batches_that_collating_gives(width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = torch.rand(10, width, generator=generator), torch.arange(10)
    order = batches([3, 1, 4], [], [1, 5, 9, 2])
    for ours, theirs in zip(
        load_batches(TensorDataset(*tensors), order),
        load_batches(Unknown(*tensors), order),
        strict=True,
    ):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert torch.equal(ours.inputs, theirs.inputs)
            assert torch.equal(ours.targets, theirs.targets)
            assert (ours.num, ours.skipped) == (theirs.num, theirs.skipped)
            assert ours.inputs.dtype == theirs.inputs.dtype
