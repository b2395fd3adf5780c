"""Batches from samples of any structure, and what no batch can be made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from gpupool.core.errors import DataError
from gpupool.data.reading.batches import batch_of
from gpupool.data.reading.loader import load_batches
from tests.support.raising import raises


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


class Gaps(Dataset[Any]):
    """None for sample 5."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int] | None:
        return None if index == 5 else (torch.ones(2), index)


def present(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


@pytest.mark.parametrize("collate", [None, present])
def test_none_for_a_sample_is_named_and_not_counted(collate: Any) -> None:
    batches = load_batches(Gaps(), np.split(np.arange(8), 2), collate=collate)
    assert next(batches) is not None
    with raises(DataError, "sample 5 ", "SampleError", 'on_error="skip"', kind="no sample"):
        next(batches)
