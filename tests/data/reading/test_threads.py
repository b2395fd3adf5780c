"""Data sets of ours: fetched by many threads, decoded by a few, delivered in order."""

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

from gpupool.core.errors import DataError, SampleError
from gpupool.data.reading.collate import Batch
from gpupool.data.reading.loader import load_batches
from gpupool.data.reading.samples import Draw, Skipped
from tests.data.reading.points import (
    TIMEOUT_S,
    Points,
    first,
    full,
    join_loaders,
    num_threads,
    open_when,
    until,
)
from tests.support.raising import raises

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    join_loaders()


def numbers(loading: Iterator[Batch | None]) -> list[list[int]]:
    """The index of each sample, as its input and its target say alike."""
    found = []
    for batch in full(loading):
        assert batch.inputs[:, 0, 0, 0].tolist() == [i % 256 for i in batch.targets.tolist()]
        found.append(batch.targets.tolist())
    return found


@pytest.mark.parametrize("depth", [0, 2])
def test_order_and_content_do_not_depend_on_which_read_is_slow(depth: int) -> None:
    order = np.random.default_rng(0).permutation(300)
    wanted = np.split(order, [7, 7, 64, 65, 200, 299])
    loaded = list(load_batches(Points(300, 0.002), wanted, depth=depth))
    assert [batch is None for batch in loaded] == [False, True, *[False] * 5]
    assert numbers(iter(loaded)) == [one.tolist() for one in wanted if len(one)]


def test_many_fetch_at_once_and_few_decode() -> None:
    dataset = Points(400, closed_from=0)
    open_when(dataset, lambda: dataset.max_fetching == 64)
    assert len(numbers(load_batches(dataset, np.array_split(np.arange(400), 5)))) == 5
    assert dataset.max_fetching == 64
    assert dataset.max_decoding <= torch.get_num_threads()


def test_what_is_read_ahead_is_bounded() -> None:
    dataset = Points(4000)
    loading = load_batches(dataset, np.array_split(np.arange(4000), 1000), depth=2)
    for _ in range(3):
        next(loading)
    until(lambda: len(dataset.fetched) >= 192)
    time.sleep(0.05)  # what it should not do has no event
    assert len(dataset.fetched) <= 3 * 4 + 192  # taken, and under way
    loading.close()


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_of_a_sample_comes_out_at_its_own_batch(depth: int) -> None:
    for kind, error in (("missing", SampleError), ("damaged", SampleError), ("broken", DataError)):
        dataset = Points(40)
        setattr(dataset, kind, {25})
        loading = load_batches(dataset, np.array_split(np.arange(40), 4), depth=depth)
        assert [first(loading).num, first(loading).num] == [10, 10]
        with pytest.raises(error, match="point 25"):
            next(loading)
        assert list(loading) == []


@pytest.mark.parametrize("depth", [0, 2])
def test_skipped_samples_are_listed_and_the_others_keep_their_order(depth: int) -> None:
    dataset = Points(12, 0.002)
    dataset.damaged, dataset.missing = {0, 3, 8, 9, 10, 11}, {5}
    loaded = full(load_batches(dataset, np.split(np.arange(12), 3), depth=depth, skip=True))
    assert [batch.num for batch in loaded] == [2, 3, 0]
    assert numbers(iter(loaded[:2])) == [[1, 2], [4, 6, 7]]
    assert loaded[2].inputs is None
    assert loaded[0].skipped == (Skipped("points/0", "damaged"), Skipped("points/3", "damaged"))
    assert loaded[1].skipped == (Skipped("points/5", "missing"),)
    assert len(loaded[2].skipped) == 4


def test_what_is_no_fault_of_a_sample_is_not_skipped() -> None:
    dataset = Points(4)
    dataset.broken = {2}
    with pytest.raises(DataError, match="refuses point 2"):
        next(load_batches(dataset, [np.arange(4)], skip=True))


def test_targets_and_inputs_of_any_kind() -> None:
    class Kinds(Points):
        def decode(self, index: int, fetched: int, draw: Draw | None) -> tuple[Any, Any]:
            return {"x": torch.ones(2) * index, "n": index}, torch.ones(
                3, dtype=torch.int64
            ) * index

    batch = first(load_batches(Kinds(4), [np.array([3, 1])]))
    assert batch.inputs["x"].tolist() == [[3, 3], [1, 1]]
    assert batch.inputs["n"].tolist() == [3, 1]
    assert batch.targets.tolist() == [[3] * 3, [1] * 3]


def test_samples_that_do_not_fit_together_say_what_to_do() -> None:
    class Sizes(Points):
        def sample(self, index: int) -> torch.Tensor:
            return torch.zeros(3, 2, 2 + index % 2)

    class Types(Points):
        def sample(self, index: int) -> torch.Tensor:
            return torch.zeros(3, dtype=torch.int64 if index else torch.float32)

    class Mixed(Points):
        def sample(self, index: int) -> Any:
            return torch.zeros(3) if index else np.zeros(3, np.float32)

    class Nothing(Points):
        def sample(self, index: int) -> Any:
            return None

    for dataset, kind, shown in (
        (Sizes(4), "sizes", "(3 x 2 x 2, 3 x 2 x 3)"),
        (Types(4), "types", " inputs "),
        (Mixed(4), "types", "(float32, torch.float32)"),
        (Nothing(4), "no batch", " inputs (NoneType)"),
    ):
        with raises(DataError, shown, kind=kind):
            next(load_batches(dataset, [np.arange(4)]))


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 30), max_size=8),
    bad=st.sets(st.integers(0, 240)),
    depth=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_threads_give_what_one_thread_gives(
    sizes: list[int], bad: set[int], depth: int, seed: int
) -> None:
    order = np.random.default_rng(seed).permutation(sum(sizes))
    wanted = np.split(order, np.cumsum(sizes)[:-1]) if sizes else []

    def read(depth: int, delay_s: float) -> list[Any]:
        dataset = Points(len(order), delay_s)
        dataset.damaged, dataset.missing = {i for i in bad if i % 2}, {i for i in bad if not i % 2}
        loading = load_batches(dataset, wanted, depth=depth, skip=True)
        return [one and (one.num and one.targets.tolist(), one.skipped) for one in loading]

    assert read(depth, 0.001) == read(0, 0.0)


def test_closing_does_not_wait_for_a_store_that_hangs_and_ends_the_other_threads() -> None:
    dataset = Points(200, closed_from=150)
    loading = load_batches(dataset, np.array_split(np.arange(200), 4))
    next(loading)
    assert dataset.reached.wait(TIMEOUT_S)
    loading.close()
    assert not dataset.gate.is_set()
    until(lambda: num_threads() <= 50)  # only those in the store
    dataset.gate.set()
    join_loaders()


def test_dropping_the_iterator_ends_its_threads() -> None:
    for batch in load_batches(Points(1000), np.array_split(np.arange(1000), 100)):
        assert batch is not None
        break
    until(lambda: num_threads() == 0)


def test_the_cores_of_the_caller_are_left_as_they_are() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen: list[int] = []

        class Seeing(Points):
            def sample(self, index: int) -> torch.Tensor:
                seen.append(torch.get_num_threads())
                return torch.zeros(1)

        dataset = Seeing(40, 0.002)
        list(load_batches(dataset, [np.arange(40)]))
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert seen[-1] == 2
    finally:
        torch.set_num_threads(before)


INTERRUPTED = """
import signal, sys, threading, time
import numpy as np
import torch
from gpupool.data.reading.loader import load_batches
from gpupool.data.reading.samples import read_samples
from tests.data.reading.points import Points

def threads():
    return [t for t in threading.enumerate() if t.name.startswith("gpupool-loader")]

random = np.random.default_rng(int(sys.argv[1]))
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
    deadline = time.monotonic() + 20
    while threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not threads(), threads()
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
print(interrupts, len(threads()) > 0)  # and the process ends, although the store hangs
"""


def test_an_interrupt_at_any_place_ends_all_threads_and_hangs_nothing() -> None:
    code = (
        "import signal\nsignal.signal(signal.SIGALRM, signal.default_int_handler)\n" + INTERRUPTED
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "0"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert (done.stdout.split(), done.stderr) == (["31", "True"], "")
