"""Which values are sent again, and what refers to what; without a rank."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch

from gpupool.core.wire.pickles import Source, TooLargeError
from gpupool.pool.variables.buffers import Buffers
from gpupool.pool.variables.parcels import Parcels


class Notebook:
    """Names and the parcels made of them, a round at a time."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.buffers = Buffers()
        self.parcels = Parcels(self.buffers)

    def num_bytes(self) -> int:
        """How much memory is taken beside the messages."""
        return sum(num_bytes for num_bytes, _ in self.buffers._stored)

    def read(self, *names: str) -> list[int]:
        """The numbers of the parcels of these names in a new round."""
        self.parcels.begin(self.names)
        return [self.parcels.parcel(name, self.names[name]).number for name in names]


@pytest.fixture
def notebook() -> Notebook:
    """An empty one."""
    return Notebook()


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ({"a": [np.zeros(3)]}, lambda x: x["a"].append(2)),
        (np.zeros(100_000), lambda x: x.__setitem__(99_999, 1)),
        (torch.zeros(1000), lambda x: x[500:].fill_(1)),
        (torch.nn.Linear(2, 2), lambda x: x.eval()),
    ],
    ids=["dict", "array", "tensor", "flag"],
)
def test_a_value_is_another_parcel_when_it_has_changed(
    notebook: Notebook, value: object, change: Any
) -> None:
    notebook.names |= {"x": value, "n": 5}
    first, number = notebook.read("x", "n")
    assert notebook.read("x", "n") == [first, number]
    change(value)
    second, same = notebook.read("x", "n")
    assert (second > first, same) == (True, number)
    assert notebook.read("x") == [second]
    assert {*notebook.parcels.by_number} == {number, second}


def test_the_notebook_can_let_go_of_what_it_has_sent(notebook: Notebook) -> None:
    notebook.names["x"] = np.zeros(1000)
    alive = weakref.ref(notebook.names["x"])
    notebook.read("x")
    del notebook.names["x"]
    assert alive() is None
    notebook.read()
    assert notebook.parcels.by_number == {}


def test_a_constant_stays_what_it_is_whatever_becomes_of_the_value(notebook: Notebook) -> None:
    array = np.zeros(300 << 20, np.uint8)  # there is no limit
    notebook.names["pair"] = [array[:2], array]
    number = notebook.parcels.constant(array).number
    array[0] = 1
    with pytest.raises(TooLargeError):
        notebook.read("pair")  # which is no part of the constant
    assert notebook.num_bytes() >= array.nbytes
    notebook.parcels.drop(number)
    notebook.read()
    assert notebook.parcels.by_number == {}
    assert notebook.num_bytes() == 0


def test_equal_contents_are_in_memory_once_and_yet_apart(notebook: Notebook) -> None:
    one, other = np.ones(1 << 20), np.ones(1 << 20)
    notebook.names |= {"x": {"a": one, "b": other}, "y": [one[:], "more"]}
    first, _ = notebook.read("x", "y")
    assert one.nbytes <= notebook.num_bytes() < 1.1 * one.nbytes
    x, _ = Source(notebook.parcels.by_number[first].wire).load()
    x["a"][0] = 5
    assert (x["b"][0], one[0]) == (1, 1)
    one[0] = 7  # changed: both are sent again, and the old content goes when nobody has it
    notebook.read("x", "y")
    assert notebook.num_bytes() < 2.1 * one.nbytes
