"""torch's Subset and ConcatDataset of data sets of ours: read as those are."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, random_split

from gpupool.core.errors import DataError
from gpupool.data.reading.inputs import opened
from gpupool.data.reading.loader import load_batches
from gpupool.data.reading.samples import Draw, Normalization, Samples
from tests.data.reading.datasets import Points, open_when
from tests.support.raising import raises


class Noisy(Points):
    normalization = Normalization.of(0.5, 0.2)

    def sample(self, index: int) -> torch.Tensor:
        return torch.rand(2)


def test_samples_are_those_of_the_parts_and_are_fetched_many_at_once() -> None:
    first, second = Points(10), Points(5)
    part, _ = random_split(ConcatDataset([first, Subset(second, [4, 1, 2])]), [12, 1])
    dataset = opened(part)
    assert isinstance(dataset, Samples)
    (batch,) = load_batches(dataset, [np.arange(12)])
    assert batch is not None
    expected = [*range(10), 4, 1, 2]
    assert batch.targets.tolist() == [expected[place] for place in part.indices]
    assert [dataset[place][1] for place in range(12)] == batch.targets.tolist()
    third = Points(5, closed_from=0)
    open_when(third, lambda: third.max_fetching == 4)
    (batch,) = load_batches(opened(Subset(third, [0, 1, 2, 3])), [np.arange(4)])
    assert third.max_fetching == 4


def test_random_numbers_are_those_of_the_sample_and_differ_between_parts() -> None:
    draw, noisy = Draw(0, 1), Noisy(6)
    (whole,) = load_batches(noisy, [np.arange(6)], draw=draw)
    (part,) = load_batches(opened(Subset(noisy, [5, 2])), [np.arange(2)], draw=draw)
    (both,) = load_batches(opened(ConcatDataset([noisy, noisy])), [np.arange(12)], draw=draw)
    assert whole is not None
    assert part is not None
    assert both is not None
    assert torch.equal(part.inputs, whole.inputs[[5, 2]])
    assert len({tuple(values) for values in both.inputs.tolist()}) == 12


def test_the_normalization_is_that_of_the_parts() -> None:
    assert opened(Subset(Noisy(3), [0])).normalization == Noisy.normalization
    with raises(DataError, "normalization", kind="other settings"):
        _ = opened(ConcatDataset([Noisy(3), Points(3)])).normalization


def test_others_stay_as_they_are() -> None:
    tensors = TensorDataset(torch.zeros(3, 1), torch.zeros(3))
    for dataset in (tensors, Subset(tensors, [1]), ConcatDataset([Points(3), tensors]), Points(3)):
        assert opened(dataset) is dataset
