"""How data sets of one's own are read: the same by any number of threads and processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Subset

from gpupool.core.errors import DataError
from gpupool.data.loading import ways
from gpupool.data.loading.measuring import Measured, Way, choose
from gpupool.data.loading.ways import load_batches
from gpupool.data.reading.collate import Batch
from gpupool.data.reading.samples import Draw
from tests.data.loading.drawing import NUM, Bad, Drawing, DrawingLate, Plain, Together
from tests.support.processes import gone, until

ROOT = Path(__file__).parents[3]
BATCHES = [np.arange(i, min(i + 8, NUM)) for i in range(0, NUM, 8)]
DEADLINE_S = 60.0
KEPT_S = 15.0  # by when processes that were chosen are there


def read(dataset: Any, workers: int | None, **settings: Any) -> list[Batch]:
    draw = settings.pop("draw", Draw(3, 5))
    batches = settings.pop("batches", BATCHES)
    found = list(load_batches(dataset, batches, draw=draw, workers=workers, **settings))
    return [batch for batch in found if batch is not None]


def inputs(batches: list[Batch]) -> torch.Tensor:
    return torch.cat([batch.inputs for batch in batches])


@contextmanager
def by_processes(
    dataset: Any, workers: int, batches: Any = BATCHES
) -> Iterator[Callable[..., list[Batch]]]:
    """Reads by processes alone, once they are there."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        # What was measured on a busy machine may say threads, for as long as it is kept.
        with ways.kept(1000):
            kept_until = time.monotonic() + KEPT_S
            while time.monotonic() < kept_until:
                read(dataset, workers, batches=batches)
                if "process" in ways.read_by(dataset):
                    yield lambda **settings: read(dataset, workers, **settings)
                    return
    raise AssertionError("no processes have read")


def readers() -> list[psutil.Process]:
    """The processes that read for this one; the first is their server."""
    found = psutil.Process().children(recursive=True)
    return [one for one in found if one.name() == "gpupool:reads"]


WAITING, COMPUTING = Measured(0.02, 0.0001, 0.0), Measured(0.02, 0.02, 0.0)


@pytest.mark.parametrize(
    ("workers", "cores", "what", "draws", "expected"),
    [
        (None, 8, WAITING, False, "64 threads"),
        (None, 8, COMPUTING, False, "8 processes"),
        (None, 1, COMPUTING, False, "1 thread"),  # it would only take the core away
        (None, 8, Measured(1e-6, 1e-6, 0.0), False, "1 thread"),  # handing it over takes longer
        (None, 8, WAITING, True, "16 processes"),
        (0, 8, WAITING, True, "the training's own thread"),
        (3, 1, COMPUTING, False, "3 processes"),
        (3, 4, WAITING, True, "3 processes"),
    ],
)
def test_the_way_is_chosen_by_what_was_measured(
    workers: int | None, cores: int, what: Measured, draws: bool, expected: str
) -> None:
    chosen = choose(workers, cores, what, 10_000, draws=draws, can_travel=True)
    assert str(chosen) == expected


def test_processes_are_not_started_for_little_or_for_what_cannot_travel() -> None:
    little = choose(None, 8, COMPUTING, 100, draws=False, can_travel=True)
    assert little == Way("threads", 1)
    stays = choose(None, 8, COMPUTING, 10_000, draws=False, can_travel=False)
    assert stays == Way("threads", 1)
    assert choose(4, 8, COMPUTING, 10, draws=False, can_travel=False) == Way("threads", 4)
    assert choose(4, 8, COMPUTING, 10, draws=True, can_travel=False) == Way("here")


def test_what_waits_is_read_by_many_threads() -> None:
    dataset = Plain(wait_s=0.01)
    with ways.kept():
        read(dataset, None)
        assert ways.read_by(dataset).endswith(" threads")
        assert not readers()


@pytest.mark.parametrize(
    "dataset", [Drawing(), DrawingLate(), Together()], ids=lambda d: type(d).__name__
)
def test_numbers_drawn_are_the_same_by_any_number_of_threads_and_processes(dataset: Any) -> None:
    expected = inputs(read(dataset, 0))
    # One after the other, in another order and in other batches.
    alone = [inputs(read(dataset, 0, batches=[np.array([i])]))[0] for i in (59, 8, 3, 52)]
    assert torch.equal(torch.stack(alone), expected[[59, 8, 3, 52]])
    assert not torch.equal(inputs(read(dataset, 0, draw=Draw(3, 6))), expected)
    for workers in (0, 1, 3, None):
        assert torch.equal(inputs(read(dataset, workers)), expected)
    with by_processes(dataset, 3) as by:
        again = by()
    assert torch.equal(inputs(again), expected)
    assert [batch.targets.tolist() for batch in again] == [one.tolist() for one in BATCHES]
    half = Subset(dataset, list(range(0, NUM, 2)))
    assert torch.equal(
        inputs(read(half, 0, batches=[np.arange(30)])),
        inputs(read(half, 1, batches=[np.arange(10), np.arange(10, 30)])),
    )


def test_what_the_user_draws_beside_it_stays_the_users() -> None:
    random.seed(1)
    np.random.seed(2)
    np.random.normal()  # its second number is kept for the next call
    before = random.getstate(), repr(np.random.get_state())
    read(Drawing(), 0)
    read(Drawing(), None)
    assert (random.getstate(), repr(np.random.get_state())) == before


@pytest.mark.long
def test_processes_end_with_the_reading_however_that_ends() -> None:
    dataset = Plain(spin_s=0.001)
    for ends in ("well", "left", "raised"):
        with suppress(ZeroDivisionError), by_processes(dataset, 2) as by:
            batches = by()
            pids = [one.pid for one in readers()]
            assert {pid for batch in batches for pid in batch.targets.tolist()} <= set(pids)
            assert len(pids) == 3
            if ends == "left":
                next(load_batches(dataset, BATCHES, draw=Draw(0, 0), workers=2))
            if ends == "raised":
                _ = 1 / 0
        until(lambda pids=pids: gone(*pids), 3.0, "the end of the processes")  # type: ignore[misc]


@pytest.mark.long
def test_a_bad_sample_an_error_and_a_killed_process_are_told_as_without_processes() -> None:
    with by_processes(Bad(spin_s=0.001), 2, [np.arange(44, 48)]) as by:
        skipping = by(skip=True, batches=BATCHES[:2])
        assert [[one.url for one in batch.skipped] for batch in skipping] == [["3"], ["13"]]
        assert [batch.num for batch in skipping] == [7, 7]
        with pytest.raises(DataError, match="3 is bad"):
            by(batches=[np.array([3])])
        with pytest.raises(ValueError, match="sample 58") as caught:
            by(batches=[np.array([58])])
        shown = "".join(traceback.format_exception(caught.value))
        assert "return self.inner(index)" in shown
        assert 'raise ValueError(f"sample {index}")' in shown
        assert "worker.py" not in shown
        assert "in inner" in shown
        with pytest.raises(DataError) as died:
            by(batches=[np.array([55])])
        assert died.value.kind == "worker died"


KILLED = """
import sys, numpy as np
from gpupool.data.loading import ways
from gpupool.data.loading.ways import load_batches
from gpupool.data.loading.measuring import Measured, Way, choose
from gpupool.data.reading.samples import Draw
from tests.data.loading.drawing import Plain
dataset, batches = Plain(spin_s=0.05), [np.arange(20)] * 10
with ways.kept(1000):
    while True:
        for _ in load_batches(dataset, batches, draw=Draw(0, 0), workers=2):
            if "process" in ways.read_by(dataset):
                print("up", flush=True)
"""


@pytest.mark.long
def test_a_rank_that_is_killed_takes_its_processes_along() -> None:
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
        assert len(family) == 3
        rank.send_signal(signal.SIGKILL)
    until(lambda: gone(*(one.pid for one in family)), 3.0, "the end of the processes")
