"""What of a batch the network is called with, and what the loss gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpupool import DataError, TrainingOptions
from gpupool.engine.batches.form import PLAIN, Keywords, Positions, form_of

DOUBLE = torch.float64
A, B, Y = torch.zeros(2, 3), torch.ones(2, 3), torch.tensor([0, 1])


class Net(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = forward  # type: ignore[method-assign,assignment]


def one(x: Any) -> Any: ...
def two(left: Any, right: Any) -> Any: ...
def with_targets(x: Any, targets: Any = None) -> Any: ...
def of_tokens(ids: Any, labels: Any = None) -> Any: ...
def passed_on(**columns: Any) -> Any: ...
def of_batch(outputs: Any, batch: Any) -> Any: ...
def of_targets(outputs: Any, targets: Any) -> Any: ...


COLUMNS = {"left": A, "right": B, "label": Y}
NAMED = "cross_entropy"


@pytest.mark.parametrize(
    ("forward", "loss", "options", "batch", "inputs", "targets"),
    [
        # pairs
        (one, NAMED, {}, (A, Y), A, Y),
        (one, NAMED, {}, ([A, B], Y), [A, B], Y),
        (one, NAMED, {}, ({"a": A}, Y), {"a": A}, Y),
        (two, NAMED, {}, ([A, B], Y), Positions((A, B)), Y),
        (two, NAMED, {}, ({"left": A, "right": B, "n": 1}, Y), Keywords(left=A, right=B), Y),
        (two, NAMED, {"inputs": (1, 0)}, ([A, B], Y), Positions((B, A)), Y),
        (one, of_batch, {}, (A, Y), A, (A, Y)),
        (two, of_targets, {"inputs": (0, 1), "targets": "batch"}, (A, B), Positions((A, B)),
         (A, B)),
        # pairs of a network that gives its loss
        (with_targets, "output", {}, (A, Y), Positions((A, Y)), (A, Y)),
        (two, None, {"inputs": (0, 1)}, (A, Y), Positions((A, Y)), (A, Y)),
        (two, None, {}, ([A, B], Y), Positions((A, B)), ([A, B], Y)),
        (one, None, {}, (A, Y), A, (A, Y)),
        # columns
        (two, NAMED, {}, COLUMNS | {"text": "t"}, Keywords(left=A, right=B), Y),
        (one, NAMED, {}, {"a": A, "label": Y}, A, Y),
        (one, NAMED, {}, COLUMNS, {"left": A, "right": B}, Y),
        (two, NAMED, {"targets": "c"}, {"left": A, "right": B, "c": Y},
         Keywords(left=A, right=B), Y),
        (two, NAMED, {"inputs": ("a", "b"), "targets": "c"}, {"a": A, "b": B, "c": Y},
         Positions((A, B)), Y),
        (one, of_batch, {}, {"a": A, "label": Y}, A, {"a": A, "label": Y}),
        (one, of_targets, {}, {"a": A, "b": B}, {"a": A, "b": B}, {"a": A, "b": B}),
        (of_tokens, None, {}, {"ids": A, "label": Y, "text": "t"}, Keywords(ids=A, labels=Y),
         {"ids": A, "label": Y, "text": "t"}),
        (passed_on, None, {}, {"ids": A, "label": Y}, Keywords(ids=A, labels=Y),
         {"ids": A, "label": Y}),
        (one, NAMED, {}, {"a": A, "label": Y, "b": DataError("-")}, DataError, None),
        (one, NAMED, {"inputs": ("a",)}, {"a": A, "label": Y, "b": DataError("-")}, A, Y),
        (one, NAMED, {}, {"x": A, "y": Y}, DataError, None),
        (two, NAMED, {}, {"a": A, "b": B, "label": Y}, DataError, None),
        # others
        (two, NAMED, {"inputs": (1, 2), "targets": 0}, [Y, A, B], Positions((A, B)), Y),
        (two, NAMED, {"targets": 0}, [Y, A, B], Positions((A, B)), Y),
        (two, NAMED, {}, [A, B, Y], DataError, None),
        (one, "mse", {}, A, A, A),
        (one, "mse", {}, [A], A, A),
    ],
)  # fmt: skip
def test_what_goes_where(
    forward: Any, loss: Any, options: dict[str, Any], batch: Any, inputs: Any, targets: Any
) -> None:
    form = form_of(Net(forward), loss, TrainingOptions(**options))
    halves = batch if isinstance(batch, tuple) else (batch, None)
    if inputs is DataError:
        with pytest.raises(DataError):
            form.halves(*halves)
        return
    found = form.halves(*halves)
    assert shown(found) == shown((inputs, targets))


def shown(tree: Any) -> str:
    if isinstance(tree, Tensor):
        return {id(A): "A", id(B): "B", id(Y): "Y"}[id(tree)]
    if isinstance(tree, dict):
        return f"{type(tree).__name__}{ {name: shown(part) for name, part in tree.items()} }"
    if isinstance(tree, (list, tuple)):
        return f"{type(tree).__name__}{[shown(part) for part in tree]}"
    return repr(tree)


def test_without_a_network_rows_are_pairs_of_columns() -> None:
    assert PLAIN.halves({"a": A, "label": Y}, None) == (A, Y)
