"""Batches: fetched by many threads and decoded by few, or read here; of samples of any kind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import TensorDataset, default_collate

from gpupool.core.errors import DataError, SampleError
from gpupool.data.reading.batches import Reading, batch_of
from gpupool.data.reading.loader import load_batches
from gpupool.data.reading.samples import Skipped
from gpupool.data.reading.threads import read_ahead
from tests.data.reading.datasets import (
    TIMEOUT_S,
    Points,
    join_loaders,
    open_when,
)
from tests.support.processes import until
from tests.support.raising import raises

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    join_loaders()


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 30), max_size=8),
    bad=st.sets(st.integers(0, 240)),
    seed=st.integers(0, 9),
)
def test_batches_come_in_order_without_what_cannot_be_read(
    sizes: list[int], bad: set[int], seed: int
) -> None:
    order = np.random.default_rng(seed).permutation(sum(sizes))
    wanted = np.split(order, np.cumsum(sizes)[:-1]) if sizes else []
    dataset = Points(len(order), 0.001)
    dataset.damaged, dataset.missing = {i for i in bad if i % 2}, {i for i in bad if not i % 2}
    loaded = load_batches(dataset, wanted, skip=True)
    for indices, batch in zip(wanted, loaded, strict=True):
        good = [i for i in indices.tolist() if i not in bad]
        assert (batch.targets.tolist() if good else []) == good
        assert batch.inputs is None or batch.inputs[:, 0, 0, 0].tolist() == good
        assert batch.skipped == tuple(
            Skipped(f"points/{i}", "damaged" if i % 2 else "missing")
            for i in indices.tolist()
            if i in bad
        )


def test_many_fetch_at_once_and_few_decode() -> None:
    dataset = Points(400, closed_from=0)
    open_when(dataset, lambda: dataset.max_fetching == 64)
    assert len(list(load_batches(dataset, np.array_split(np.arange(400), 5)))) == 5
    assert dataset.max_fetching == 64
    assert dataset.max_decoding <= torch.get_num_threads()


def test_what_is_read_ahead_is_bounded() -> None:
    dataset = Points(4000)
    loading = load_batches(dataset, np.array_split(np.arange(4000), 1000))
    for _ in range(3):
        next(loading)
    until(lambda: len(dataset.fetched) >= 192, TIMEOUT_S)
    time.sleep(0.05)  # what it should not do has no event
    assert len(dataset.fetched) <= 3 * 4 + 192  # taken, and under way
    loading.close()


def test_an_error_of_a_sample_comes_out_at_its_own_batch() -> None:
    for kind, error in (("missing", SampleError), ("damaged", SampleError), ("broken", DataError)):
        dataset = Points(40)
        setattr(dataset, kind, {25})
        batches, skip = np.array_split(np.arange(40), 4), kind == "broken"  # no fault of a sample
        loading = load_batches(dataset, batches, skip=skip)
        assert [next(loading).num, next(loading).num] == [10, 10]
        with pytest.raises(error, match="point 25"):
            next(loading)
        assert list(loading) == []


def test_the_cores_of_the_caller_are_left_as_they_are() -> None:
    before, seen = torch.get_num_threads(), list[int]()

    class Seeing(Points):
        def sample(self, index: int) -> torch.Tensor:
            seen.append(torch.get_num_threads())
            return torch.zeros(1)

    torch.set_num_threads(2)
    try:
        list(load_batches(Seeing(40, 0.002), [np.arange(40)]))
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert seen[-1] == 2
    finally:
        torch.set_num_threads(before)


INTERRUPTED = """
import signal, threading, time
import numpy as np
from gpupool.data.reading.loader import load_batches
from tests.data.reading.datasets import Points, num_threads
from tests.support.processes import until

signal.signal(signal.SIGALRM, signal.default_int_handler)
random = np.random.default_rng(0)
wanted = np.array_split(np.arange(3000), 100)
interrupts = 0
for _ in range(30):
    dataset = Points(3000, 0.0005)
    try:
        signal.setitimer(signal.ITIMER_REAL, float(random.uniform(0.0005, 0.05)))
        for batch in load_batches(dataset, wanted):
            batch = None
        time.sleep(1)
    except KeyboardInterrupt:
        interrupts += 1
    until(lambda: num_threads() == 0, 40.0)
dataset = Points(3000, closed_from=0)
hanging = load_batches(dataset, wanted)

def interrupt():
    dataset.reached.wait()
    signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

threading.Thread(target=interrupt, daemon=True).start()
try:
    next(hanging)
except KeyboardInterrupt:
    interrupts += 1
print(interrupts, num_threads() > 0)  # and the process ends, although the store hangs
"""


def test_an_interrupt_at_any_place_ends_all_threads_and_hangs_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert (done.stdout.split(), done.stderr) == (["31", "True"], "")


# ---- in order, read here or ahead by one thread --------------------------------------------------


def test_a_thread_is_ahead_by_two_and_no_further() -> None:
    dataset = Points(10, closed_from=3)
    loading = read_ahead((dataset.fetch(index) for index in range(10)), Reading())
    next(loading)  # now 1 and 2 are read without being asked for
    next(loading)  # and 3 may start: it waits at the gate
    assert dataset.reached.wait(TIMEOUT_S)
    loading.close()  # which does not wait for it
    assert not dataset.gate.is_set()
    dataset.gate.set()
    join_loaders()
    assert dataset.fetched == [0, 1, 2, 3]


@pytest.mark.gpu
@pytest.mark.parametrize("dataset", [[(torch.ones(2), 1)] * 4, Points(4)])
def test_batches_for_a_gpu_are_pinned(dataset: Any) -> None:
    loaded = load_batches(dataset, [np.array([0, 1]), np.array([2])], device="cuda")
    assert all(batch.inputs.is_pinned() and batch.targets.is_pinned() for batch in loaded)


class Unknown(TensorDataset):
    """As `TensorDataset`, but nobody can know what its `__getitem__` does."""


@pytest.mark.parametrize("width", [8, 40_000], ids=["read at once", "read ahead"])
def test_tensors_in_memory_are_cut_into_the_batches_that_collating_gives(width: int) -> None:
    tensors = torch.rand(10, width, generator=torch.Generator()), torch.arange(10)
    order = [np.array([3, 1, 4]), np.array([1, 5, 9, 2])]
    ours, theirs = (list(load_batches(kind(*tensors), order)) for kind in (TensorDataset, Unknown))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)
        assert (one.num, one.skipped) == (other.num, other.skipped)


def test_pictures_stay_in_the_layout_of_the_decoder() -> None:
    stored = torch.arange(2 * 4 * 5 * 3, dtype=torch.uint8).reshape(2, 4, 5, 3)
    pictures = list(stored.permute(0, 3, 1, 2))
    batch = batch_of([(picture, 7) for picture in pictures], pin=False)
    assert torch.equal(batch.inputs, torch.stack(pictures))
    assert batch.inputs.is_contiguous(memory_format=torch.channels_last)
    assert batch.targets.tolist() == [7, 7]


def test_any_structure_is_collated_column_by_column() -> None:
    grey = Image.new("L", (5, 4), 3)
    batch = batch_of([(grey, grey.convert("RGBA"))] * 2, pin=False)
    assert (batch.inputs.shape, batch.targets.shape) == ((2, 1, 4, 5), (2, 3, 4, 5))
    assert batch.inputs.unique().tolist() == batch.targets.unique().tolist() == [3]
    batch = batch_of([({"x": torch.ones(2), "n": i}, i) for i in (3, 1)], pin=False)
    assert (batch.inputs["x"].shape, batch.inputs["n"].tolist()) == ((2, 2), [3, 1])
    rows = [{"ids": [1, 2], "word": "a"}, {"ids": [3, 4], "words": ["b"]}]
    batch = batch_of(rows, pin=False)
    assert batch.inputs["ids"].tolist() == [[1, 2], [3, 4]]
    assert isinstance(batch.inputs["word"], DataError)


@pytest.mark.parametrize(
    ("inputs", "kind", "shown"),
    [
        ([torch.zeros(3, 2, 2), torch.zeros(3, 2, 3)], "sizes", "(3 x 2 x 2, 3 x 2 x 3)"),
        ([torch.zeros(2), torch.zeros(2).long()], "types", " inputs "),
        ([torch.zeros(2), np.zeros(2, np.float32)], "types", "(float32, torch.float32)"),
        ([object(), object()], "no batch", " inputs (object)"),
    ],
)
def test_samples_that_do_not_fit_together_say_what_to_do(
    inputs: list[Any], kind: str, shown: str
) -> None:
    with raises(DataError, shown, kind=kind):
        batch_of([(one, 0) for one in inputs], pin=False)


def present(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


@pytest.mark.parametrize("collate", [None, present])
def test_none_for_a_sample_is_named_and_not_counted(collate: Any) -> None:
    samples = [None if index == 5 else (torch.ones(2), index) for index in range(8)]
    batches = load_batches(samples, np.split(np.arange(8), 2), collate=collate)
    assert next(batches).num == 4
    with raises(DataError, "sample 5 ", "SampleError", 'on_error="skip"', kind="no sample"):
        next(batches)
