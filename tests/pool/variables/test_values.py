"""Which values of cells and functions reach the notebook."""

from __future__ import annotations

import pytest
import torch

from gpupool import Pool, PoolError
from tests.support.raising import raises


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("torch.zeros(1024, 1024)", "tensor([["),
        ("import threading; threading.Lock()", "<unlocked _thread.lock"),
    ],
    ids=["tensor", "lock"],
)
def test_what_is_large_or_cannot_be_pickled_stays_there_and_shows_its_text(
    pool2: Pool, source: str, text: str
) -> None:
    result = pool2.run(source)
    assert result.value_text(1).startswith(text)
    with raises(PoolError, ranks=(1,)):
        result[1]


def test_a_function_returns_values_of_any_size(pool2: Pool) -> None:
    result = pool2.run(torch.full, (1024, 1024), 7.0)
    assert result[1].sum() == 7 * 1024 * 1024
