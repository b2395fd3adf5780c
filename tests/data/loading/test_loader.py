"""Batches read ahead: by one thread from data sets that are not ours."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset
from torchvision.transforms import v2

from gpupool.core.errors import DataError, SampleError
from gpupool.data.datastores.images import ImageDatastore
from gpupool.data.loading.ways import load_batches
from tests.data.reading.points import TIMEOUT_S, Points, first, full, join_loaders, num_threads
from tests.servers.s3 import SeaweedServer
from tests.support.raising import raises

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
def test_it_reads_ahead_but_not_further_than_asked(depth: int) -> None:
    dataset = Squares(closed_from=1 + depth)
    # one thread: on a busy machine a sample may seem to wait, and more would be chosen
    one_by_one = batches(*[[i] for i in range(10)])
    loading = load_batches(dataset, one_by_one, depth=depth, workers=0)
    next(loading)  # now batches 1..depth are read without being asked for
    next(loading)  # and one more may start: it waits at the gate
    assert dataset.reached.wait(TIMEOUT_S)
    assert dataset.read == list(range(depth + 2))
    loading.close()
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


def test_the_next_batch_is_ready_before_it_is_asked_for() -> None:
    dataset = Squares(closed_from=2)
    loading = load_batches(dataset, batches([0], [1], [2]), depth=2)
    next(loading)
    assert dataset.reached.wait(TIMEOUT_S)  # nobody asked for batch 1 yet, batch 2 is under way
    dataset.gate.set()
    assert len(list(loading)) == 2


def test_an_error_comes_out_at_its_own_batch() -> None:
    loading = load_batches(Squares(), batches([11], [12], [13], [14]))
    assert [first(loading)[1].item(), first(loading)[1].item()] == [121, 144]
    with pytest.raises(DataError, match="sample 13 is bad"):
        next(loading)
    assert list(loading) == []


def test_closing_does_not_wait_for_a_read_that_hangs() -> None:
    dataset = Squares(closed_from=1)
    loading = load_batches(dataset, batches([0], [1], [2]))
    next(loading)
    assert dataset.reached.wait(TIMEOUT_S)
    loading.close()
    assert not dataset.gate.is_set()
    dataset.gate.set()
    join_loaders()
    assert dataset.read == [0, 1]


def test_dropping_the_iterator_ends_the_thread() -> None:
    for batch in load_batches(Squares(), batches([0], [1], [2], [3], [4])):
        assert batch is not None
        break
    join_loaders()


def test_images_of_a_bucket_arrive_as_they_are_read_one_by_one(
    s3: SeaweedServer, photos_url: str
) -> None:
    os.environ.update(s3.env)
    test = ImageDatastore(f"{photos_url}/test")
    order = np.random.default_rng(0).permutation(len(test))
    loaded = full(load_batches(test, np.array_split(order, 4)))
    images = torch.cat([batch.inputs for batch in loaded])
    labels = torch.cat([batch.targets for batch in loaded])
    assert labels.tolist() == test.labels[order].tolist()
    assert images.dtype == torch.uint8
    for place in (0, 42, 99):
        assert torch.equal(images[place], test[int(order[place])][0])


def test_images_of_different_sizes_say_what_to_do(s3: SeaweedServer, photos_url: str) -> None:
    os.environ.update(s3.env)
    test = ImageDatastore(f"{photos_url}/test").with_transform(_some_narrow)
    with raises(DataError, "sizes", shown="3 x 28 x 20, 3 x 28 x 28"):
        next(load_batches(test, [np.arange(100)]))
    sized = test.with_transform(v2.Resize((14, 14)))
    assert first(load_batches(sized, [np.arange(100)]))[0].shape == (100, 3, 14, 14)


def _some_narrow(image: torch.Tensor) -> torch.Tensor:
    return image[:, :, :20] if image[0, 14, 14] > 100 else image


def test_samples_that_are_no_pairs_are_all_of_the_batch() -> None:
    loaded = next(load_batches(torch.arange(4), batches([0, 1])))
    assert loaded is not None
    assert (loaded.inputs.tolist(), loaded.targets) == ([0, 1], None)


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
