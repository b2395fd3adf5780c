"""Which samples are in which batch, and what each rank has of it: pure, on any ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from gpupool import OptionsError, SpmdError, TrainingOptions
from gpupool.core.options import datasets as sampling
from gpupool.engine.batches.order import epoch_batches
from gpupool.engine.batches.share import Share
from gpupool.engine.batches.shares import epoch_shares
from gpupool.engine.group.forming import World
from tests.engine.batches.streams import Points, Stream
from tests.engine.training.vectors import Backwards, Vectors
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on

CPU = torch.device("cpu")
NUM = 50
HEAVY = [0.0 if i < 10 else 1.0 + i % 3 for i in range(NUM)]


def shares_of(
    data: Any, n: int = 1, epoch: int = 1, samples_done: int = 0, **settings: Any
) -> list[list[Share]]:
    """What each of n ranks gets of an epoch."""
    options = sampling.with_data(TrainingOptions(**settings), data)
    worlds = (World(rank, n, CPU) for rank in range(n))
    return [list(epoch_shares(data, options, one, epoch, samples_done)) for one in worlds]


def order(options: TrainingOptions, epoch: int, data: Any = None) -> list[int]:
    data = data or samples(NUM)
    batches = epoch_batches(data, sampling.with_data(options, data), epoch)
    return np.concatenate(batches).tolist()


def together(shares: tuple[Share, ...], half: str) -> Tensor:
    return torch.cat([getattr(share, half)[: share.num_here] for share in shares])


# ---- shares -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 12},
        {"batch_size": 12, "weights": HEAVY},
        {"batch_size": 2, "shuffle": "never"},
        {"batch_size": 12, "collate": torch.utils.data.default_collate, "samples_done": 24},
        {"batch_size": 12, "epoch": 7, "on_error": "skip"},
    ],
)
def test_shares_of_all_ranks_are_the_batches_of_one(n: int, settings: dict[str, Any]) -> None:
    """With the same noise; a rank without samples holds one that counts nothing."""
    for data in (Points(NUM, noise=0.1), Vectors(NUM, set(), noise=0.1)):
        (alone,) = shares_of(data, **settings)
        for whole, *parts in zip(alone, *shares_of(data, n, **settings), strict=True):
            for half in ("inputs", "targets"):
                assert torch.equal(together(tuple(parts), half), getattr(whole, half))
            assert sum(part.num_here for part in parts) == whole.num_here
            assert {(part.num_all, part.is_last) for part in parts} == {
                (whole.num_all, whole.is_last)
            }
            assert {len(part.inputs) for part in parts if not part.num_here} <= {1}
        assert [share.is_last for share in alone] == [False] * (len(alone) - 1) + [True]


def test_parts_of_a_batch_have_the_same_samples_on_any_ranks() -> None:
    settings = {"batch_size": 10, "accumulate": 4, "batch_norm": "sync"}
    (alone,) = shares_of(samples(53), **settings)
    for whole, *parts in zip(alone, *shares_of(samples(53), 3, **settings), strict=True):
        cut = [part.inputs[: part.num_here].split(part.part_sizes) for part in parts]
        for number, expected in enumerate(whole.inputs.split(whole.part_sizes)):
            assert torch.equal(torch.cat([one[number] for one in cut]), expected)


def test_where_no_sample_of_a_share_can_be_read_another_stands_in() -> None:
    bad = {0, 1, 4, 5}
    settings = {"batch_size": 4, "shuffle": "never", "on_error": "skip"}
    for rank, shares in enumerate(shares_of(Vectors(8, bad), 2, **settings)):
        assert [share.num_here for share in shares] == ([0, 0] if rank == 0 else [2, 2])
        assert [len(share.skipped) for share in shares] == ([2, 2] if rank == 0 else [0, 0])
        assert all(torch.isfinite(share.inputs).all() for share in shares)
    (few,) = shares_of(Vectors(1, set()), 2, **settings)[:1]
    assert [(share.num_here, share.skipped) for share in few] == [(0, ())]


# ---- orders -------------------------------------------------------------------------------------


def test_samples_are_drawn_in_proportion_to_their_weights() -> None:
    options = TrainingOptions(weights=[0, 1, 3, 0], seed=5)
    drawn = [index for epoch in range(1, 2001) for index in order(options, epoch, samples(4))]
    counts = Counter(drawn)
    assert (len(drawn), set(counts)) == (8000, {1, 2})  # as many as the data set has, each epoch
    assert counts[2] / counts[1] == pytest.approx(3, rel=0.1)
    options = TrainingOptions(weights=HEAVY)
    assert order(options, 1) != order(options, 2)
    assert order(options, 1) == order(TrainingOptions(weights=np.array(HEAVY)), 1)
    once = TrainingOptions(weights=torch.tensor(HEAVY).double(), shuffle="once")
    assert order(once, 1) == order(once, 2) == order(options, 1)


class Columns:
    """As Hugging Face's data sets: columns by name."""

    column_names = ("label",)

    def __init__(self, label: list[int]) -> None:
        self.columns = {"label": label}

    def __len__(self) -> int:
        return len(self.columns["label"])

    def __getitem__(self, key: Any) -> Any:
        return self.columns[key]


def test_balanced_gives_each_class_the_same_weight() -> None:
    labels = [0] * 90 + [1] * 9 + [2]
    tensors, labelled = TensorDataset(torch.zeros(100, 2), torch.tensor(labels)), Points(100)
    labelled.targets = torch.tensor(labels)  # type: ignore[attr-defined]
    part = Subset(Subset(tensors, range(100)), range(100))
    for data in (tensors, labelled, part, Columns(labels)):
        found = sampling.with_data(TrainingOptions(weights="balanced"), data).weights
        assert found == pytest.approx([1 / 90] * 90 + [1 / 9] * 9 + [1.0])


def test_a_sample_that_comes_again_has_random_numbers_of_its_own() -> None:
    data = Points(4, noise=1.0)
    (shares,) = shares_of(data, weights=[0, 1, 0, 0], batch_size=3)
    noise = torch.cat([share.inputs for share in shares]) - data[1][0]
    assert len({tuple(row.tolist()) for row in noise}) == len(noise) == 4


def test_weights_that_nothing_can_use_are_refused() -> None:
    unknown = type("Stored", (), {"__len__": lambda self: 5, "__getitem__": None})()
    for data, given in [
        (Stream(5), [1.0] * 5),
        (Backwards(5, set()), [1.0] * 5),
        (unknown, [1.0]),
        (unknown, "balanced"),
    ]:
        with raises(OptionsError, "weights"):
            sampling.with_data(TrainingOptions(weights=given), data)


def test_a_resume_with_other_weights_is_refused(pools: Pools, tmp_path: Path) -> None:
    settings = {"batch_size": 12, "checkpoint": str(tmp_path), "max_steps": 2}
    train_on(pools[1], network(), samples(NUM), weights=HEAVY, **settings)
    with raises(SpmdError, "resume", "weights"):
        train_on(pools[1], network(), samples(NUM), resume=True, weights=[1.0] * NUM, **settings)
