"""Which values of cells and functions reach the notebook."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpupool import Pool, PoolError
from tests.support.raising import raises


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("rank * 2", {0: 0, 1: 2}),
        ("{'loss': [0.5, rank]}", {0: {"loss": [0.5, 0]}, 1: {"loss": [0.5, 1]}}),
        ("x = 1", {0: None, 1: None}),
        ("class Point:\n    x = 3\nPoint.x", {0: 3, 1: 3}),
    ],
)
def test_the_last_expression_of_a_cell_comes_along(
    pool2: Pool, source: str, expected: dict[int, object]
) -> None:
    assert dict(pool2.run(source)) == expected


def test_tensors_and_arrays_come_along_while_they_are_small(pool2: Pool) -> None:
    assert torch.equal(pool2.run("torch.arange(3) + rank")[1], torch.tensor([1, 2, 3]))
    assert np.array_equal(pool2.run("import numpy; numpy.ones((2, 2))")[0], np.ones((2, 2)))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("torch.zeros(1024, 1024)", "tensor([["),
        ("{'weights': torch.zeros(1024, 1024)}", "{'weights': tensor"),
        ("torch.nn.Linear(1024, 1024)", "Linear(in_features=1024"),
        ("'x' * 2_000_000", "'xxx"),
        ("import threading; threading.Lock()", "<unlocked _thread.lock"),
    ],
    ids=["tensor", "in a dict", "module", "string", "lock"],
)
def test_what_is_large_or_cannot_be_pickled_stays_there_and_shows_its_text(
    pool2: Pool, source: str, text: str
) -> None:
    result = pool2.run(source)
    assert result.value_text(1).startswith(text)
    with raises(PoolError, "no value", ranks=(1,)):
        result[1]


def test_a_function_returns_values_of_any_size(pool2: Pool) -> None:
    result = pool2.run(torch.full, (1024, 1024), 7.0)
    assert result[1].sum() == 7 * 1024 * 1024


def test_a_value_whose_repr_fails_is_told_and_fails_no_cell(pool2: Pool) -> None:
    source = "class Odd:\n    def __repr__(self):\n        raise ValueError('no text')\nOdd()"
    result = pool2.run(source)
    assert result.value_text(1) == "<Odd: its __repr__ raised ValueError>"
    assert "ValueError" in result.text(1)  # with its traceback, as IPython says it
    assert dict(pool2.run("rank")) == {0: 0, 1: 1}
