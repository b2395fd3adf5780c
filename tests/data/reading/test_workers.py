"""How data sets of one's own are read: the same here and by any number of workers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Subset

from gpupool.core.errors import DataError
from gpupool.data.reading import loader
from gpupool.data.reading.batches import Batch, Reading, Rows
from gpupool.data.reading.loader import load_batches, num_workers_for
from gpupool.data.reading.samples import Draw
from tests.data.reading.datasets import NUM, Bad, Drawing, Hanging, Opening, Plain, Points, Together
from tests.support.processes import gone, until
from tests.support.raising import raises

ROOT = Path(__file__).parents[3]
BATCHES = [np.arange(i, min(i + 8, NUM)) for i in range(0, NUM, 8)]


def read(dataset: Any, workers: int | None, **settings: Any) -> list[Batch]:
    draw = settings.pop("draw", Draw(3, 5))
    batches = settings.pop("batches", BATCHES)
    return list(load_batches(dataset, batches, draw=draw, workers=workers, **settings))


def inputs(batches: list[Batch]) -> torch.Tensor:
    return torch.cat([batch.inputs for batch in batches])


def readers() -> list[int]:
    found = psutil.Process().children()
    return [one.pid for one in found if one.name() == "pt_data_worker"]


@pytest.mark.parametrize(
    ("wall_s", "cpu_s", "num_samples", "cores", "expected"),
    [
        (0.01, 0.01, 200, 4, 0),  # to start them takes as long
        (0.01, 0.009, 1000, 4, 4),
        (0.01, 0.001, 1000, 4, 32),  # they wait: at most eight times the cores
        (0.01, 0.0025, 1000, 4, 16),
        (0.01, 0.0, 1000, 1, 8),
    ],
)
def test_as_many_workers_as_cores_or_more_where_they_wait(
    wall_s: float, cpu_s: float, num_samples: int, cores: int, expected: int
) -> None:
    assert num_workers_for(wall_s, cpu_s, num_samples, cores) == expected


def test_the_first_batch_shows_how_the_others_are_read() -> None:
    for dataset, passes, shown in (
        (Plain(), 1, "the training's own thread"),
        (Plain(wait_s=0.002), 10**6, f"{8 * torch.get_num_threads()} workers"),
    ):
        with loader.kept(passes):
            batches = read(dataset, None)
            assert loader.read_by(dataset) == shown
            pids = {pid for batch in batches[1:] for pid in batch.targets.tolist()}
            assert (pids == {os.getpid()}) == (passes == 1)
            assert pids <= {os.getpid(), *readers()}


@pytest.mark.parametrize("dataset", [Drawing(), Together()], ids=lambda d: type(d).__name__)
def test_numbers_drawn_are_the_same_by_any_number_of_workers(dataset: Any) -> None:
    expected = inputs(read(dataset, 0))
    # One after the other, in another order and in other batches.
    alone = [inputs(read(dataset, 0, batches=[np.array([i])]))[0] for i in (59, 8, 3, 52)]
    assert torch.equal(torch.stack(alone), expected[[59, 8, 3, 52]])
    assert not torch.equal(inputs(read(dataset, 0, draw=Draw(3, 6))), expected)
    for workers in (1, 3, None):
        again = read(dataset, workers)
        assert torch.equal(inputs(again), expected)
        assert [i for batch in again for i in batch.targets.tolist()] == list(range(NUM))
    half = Subset(dataset, list(range(0, NUM, 2)))
    assert torch.equal(
        inputs(read(half, 0, batches=[np.arange(30)])),
        inputs(read(half, 1, batches=[np.arange(10), np.arange(10, 30)])),
    )


class NumpyPoints(Points):
    """Samples of ours that draw from a generator which threads share."""

    def sample(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.random.normal(size=2)) + random.random()


def test_what_draws_from_generators_that_threads_share_is_read_alone_and_puts_them_back() -> None:
    random.seed(1)
    np.random.seed(2)
    np.random.normal()  # its second number is kept for the next call
    before = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
    rows, reading = Rows(NumpyPoints(NUM)), Reading(Draw(3, 5))
    expected = inputs([rows.batch(batch, reading) for batch in BATCHES])
    for workers in (None, 2):
        assert torch.equal(inputs(read(NumpyPoints(NUM), workers)), expected)
        read(Drawing(), workers)
    after = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
    assert after == before


class Importing(Points):
    """Its store draws when it is asked first, as a client does that is imported then."""

    def __init__(self) -> None:
        super().__init__(NUM)
        self.first, self.is_imported = threading.Lock(), False

    def fetch(self, index: int) -> int:
        with self.first:
            if not self.is_imported:
                random.random()
            self.is_imported = True
        return super().fetch(index)


def test_a_store_that_draws_is_read_by_threads_all_the_same() -> None:
    points = Importing()
    assert len(inputs(read(points, 2))) == NUM
    assert sorted(points.fetched) == list(range(NUM))  # here, so by no worker


def test_where_all_of_the_first_batch_is_skipped_the_others_come_once() -> None:
    points = NumpyPoints(NUM)
    points.damaged = set(range(10))
    parts = [np.arange(10), np.arange(10, 20), np.arange(20, 30)]
    batches = read(points, None, batches=parts, skip=True)
    found = [batch.targets.tolist() if batch.num else [] for batch in batches]
    assert found == [[], list(range(10, 20)), list(range(20, 30))]


def test_workers_stay_for_the_epochs_and_open_files_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(NUM)))
    dataset, expected = Opening(path), list(range(NUM))
    with loader.kept(10**6):
        seen = set()
        for _ in range(3):
            batches = read(dataset, None)
            assert [value for batch in batches for value in batch.inputs.tolist()] == expected
            seen.add(tuple(readers()))
        assert len(seen) == 1
        (pids,) = seen
        # while one pass goes on, the next one has others
        first = load_batches(dataset, BATCHES, draw=Draw(0, 0))
        next(first)
        read(dataset, None)
        assert len(readers()) == 2 * len(pids)
        assert len(list(first)) == len(BATCHES) - 1
    assert dataset.file is not None
    dataset.file.close()
    until(lambda: not readers(), 3.0, "the end of the workers")


def test_workers_end_with_the_reading_however_that_ends() -> None:
    for dataset, num in ((Plain(), len(BATCHES)), (Plain(), 1), (Hanging(), 1)):
        loading = load_batches(dataset, BATCHES, workers=2)
        for _ in range(num):
            next(loading)
        assert len(readers()) == 2
        loading.close()
        until(lambda: not readers(), 3.0, "the end of the workers")


def test_a_bad_sample_an_error_and_a_killed_worker_are_told() -> None:
    skipping = read(Bad(), 2, skip=True, batches=BATCHES[:2])
    assert [[one.url for one in batch.skipped] for batch in skipping] == [["3"], ["13"]]
    assert [batch.num for batch in skipping] == [7, 7]
    for index, kind, url in ((3, "damaged", "3"), (55, "worker died", "")):
        with raises(DataError, kind=kind, url=url):
            read(Bad(), 2, batches=[np.array([index])])
    with pytest.raises(ValueError, match="sample 58") as caught:
        read(Bad(), 2, batches=[np.array([58])])
    shown = "".join(traceback.format_exception(caught.value))
    assert "in inner" in shown
    assert "return self.inner(index)" in shown
    assert "batches.py" not in shown


KILLED = """
import numpy as np
from gpupool.data.reading.loader import load_batches
from tests.data.reading.datasets import Plain
for _ in load_batches(Plain(spin_s=0.05), [np.arange(4)] * 1000, workers=2):
    print("up", flush=True)
"""


def test_a_rank_that_is_killed_takes_its_workers_along() -> None:
    rank = subprocess.Popen(
        [sys.executable, "-c", KILLED],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert rank.stdout is not None
    with rank:
        assert rank.stdout.readline() == b"up\n"
        family = psutil.Process(rank.pid).children(recursive=True)
        assert len(family) == 2
        rank.send_signal(signal.SIGKILL)
    until(lambda: gone(*(one.pid for one in family)), 3.0, "the end of the workers")
