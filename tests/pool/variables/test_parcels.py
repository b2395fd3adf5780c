"""Which values are sent again, and what refers to what; without a rank."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch

from gpupool.core.wire.pickles import Source
from gpupool.pool.variables.buffers import Buffers
from gpupool.pool.variables.parcels import Parcels


class Notebook:
    """Names and the parcels made of them, a round at a time."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.buffers = Buffers()
        self.parcels = Parcels(self.buffers)
        self.made: set[int] = set()

    def read(self, *names: str) -> tuple[int, ...]:
        """The numbers of the parcels of these names in a new round."""
        self.parcels.begin(self.names)
        numbers = tuple(self.parcels.parcel(name, self.names[name]).number for name in names)
        self.made.update(numbers)
        return numbers

    @property
    def forgotten(self) -> list[int]:
        """The numbers of those that nobody needs any more."""
        return sorted(self.made.difference(self.parcels.alive()))


@pytest.fixture
def notebook() -> Notebook:
    """An empty one."""
    return Notebook()


@pytest.mark.parametrize(
    "value",
    [5, {"a": np.zeros(3)}, torch.ones(3), torch.nn.Linear(2, 2)],
    ids=lambda value: type(value).__name__,
)
def test_an_unchanged_value_keeps_its_number(notebook: Notebook, value: object) -> None:
    notebook.names["x"] = value
    assert notebook.read("x") == notebook.read("x") == (1,)
    assert notebook.forgotten == []


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ({"a": [1]}, lambda x: x["a"].append(2)),
        (np.zeros(100_000), lambda x: x.__setitem__(99_999, 1)),
        (torch.zeros(1000), lambda x: x[500:].fill_(1)),
        (torch.nn.Linear(2, 2), lambda x: x.eval()),
    ],
    ids=["dict", "array", "tensor", "flag"],
)
def test_a_value_changed_in_place_gets_a_new_one(
    notebook: Notebook, value: object, change: Any
) -> None:
    notebook.names["x"] = value
    notebook.read("x")
    change(value)
    assert notebook.read("x") == (2,)
    assert notebook.read("x") == (2,)
    assert notebook.forgotten == [1]


def test_what_comes_later_refers_to_the_parts_of_what_is_there(notebook: Notebook) -> None:
    model = torch.nn.Linear(1000, 1000)
    notebook.names |= {"model": model, "opt": torch.optim.SGD(model.parameters(), lr=0.1)}
    assert notebook.read("model") == (1,)
    assert notebook.read("opt", "model") == (2, 1)
    assert notebook.parcels.with_needs([2]) == {1, 2}
    assert notebook.parcels[2].contents == []  # the weights are not in it
    notebook.names["opt"].param_groups[0]["lr"] = 0.2
    assert notebook.read("model", "opt") == (1, 3)


def test_who_refers_to_a_changed_value_is_sent_again_too(notebook: Notebook) -> None:
    model = torch.nn.Linear(2, 2)
    notebook.names |= {"model": model, "opt": torch.optim.SGD(model.parameters(), lr=0.1)}
    notebook.read("model", "opt")
    model.weight.data.fill_(1)
    assert notebook.read("opt") == (3,)  # it is the owner of the weights now
    assert notebook.read("model", "opt") == (4, 3)
    assert notebook.parcels.with_needs([4]) == {3, 4}


def test_two_values_that_come_to_refer_to_each_other(notebook: Notebook) -> None:
    class Box:
        """Holds something."""

        content: object = None

    first, second = Box(), Box()
    second.content = first
    notebook.names |= {"first": first, "second": second}
    notebook.read("first", "second")
    first.content = second
    numbers = notebook.read("first", "second")
    assert len(notebook.parcels.with_needs(numbers)) == 2
    assert notebook.read("second", "first") == numbers[::-1]


def test_the_notebook_can_let_go_of_what_it_has_sent(notebook: Notebook) -> None:
    notebook.names["x"] = np.zeros(1000)
    alive = weakref.ref(notebook.names["x"])
    notebook.read("x")
    del notebook.names["x"]
    assert alive() is None
    notebook.read()
    assert notebook.forgotten == [1]


def test_a_constant_is_never_looked_at_again_and_has_no_limit(notebook: Notebook) -> None:
    array = np.zeros(300 << 20, np.uint8)
    number = notebook.parcels.constant(array).number
    array[0] = 1
    notebook.read()
    assert notebook.parcels.open(number)[0] == 0
    assert notebook.parcels.open(number) is notebook.parcels.open(number)
    assert notebook.buffers.num_bytes >= array.nbytes
    notebook.parcels.drop(number)
    notebook.read()
    assert notebook.parcels.alive() == []
    assert notebook.buffers.num_bytes == 0


def test_equal_contents_are_in_memory_once_and_yet_apart(notebook: Notebook) -> None:
    one, other = np.ones(1 << 20), np.ones(1 << 20)
    notebook.names |= {"x": {"a": one, "b": other}, "y": [one[:], "more"]}
    notebook.read("x", "y")
    assert one.nbytes <= notebook.buffers.num_bytes < 1.1 * one.nbytes
    x, _ = Source(notebook.parcels[1].wire).load()
    x["a"][0] = 5
    assert (x["b"][0], one[0]) == (1, 1)
    one[0] = 7  # changed: both are sent again, and the old content goes when nobody has it
    notebook.read("x", "y")
    assert notebook.buffers.num_bytes < 2.1 * one.nbytes
