"""What validations tell: the best, and enough."""

from __future__ import annotations

import math

import pytest

from gpupool.engine.training.early_stopping import EarlyStopping


@pytest.mark.parametrize(
    ("objective", "values", "is_best"),
    [
        ("loss", [1.0, 0.5, 0.7, 0.4], [True, True, False, True]),
        ("val_loss", [1.0, 0.5], [True, True]),
        ("rmse", [1.0, 1.0, 0.9], [True, False, True]),
        ("accuracy", [0.5, 0.4, 0.6], [True, False, True]),
        ("mean_iou", [math.nan, 0.4, math.nan, 0.5], [False, True, False, True]),
    ],
)
def test_the_best_is_the_least_or_the_most_by_name(
    objective: str, values: list[float], is_best: list[bool]
) -> None:
    stopping = EarlyStopping(objective)
    assert [stopping.add_validation({objective: value}) for value in values] == is_best


def test_patience_counts_validations_in_a_row() -> None:
    stopping = EarlyStopping("loss", patience=2)
    found = []
    for loss in [1.0, 1.1, 0.9, 1.0, 1.0]:
        stopping.add_validation({"loss": loss})
        found.append(stopping.is_patience_over)
    assert found == [False, False, False, False, True]


def test_early_stopping_continues_where_another_one_was() -> None:
    first, second = EarlyStopping("accuracy", patience=3), EarlyStopping("accuracy", patience=3)
    first.add_validation({"accuracy": 0.5})
    first.add_validation({"accuracy": 0.4})
    second.load_state_dict(first.state_dict())
    assert not second.add_validation({"accuracy": 0.5})
    assert not second.is_patience_over
    assert not second.add_validation({"accuracy": 0.5})
    assert second.is_patience_over
    assert second.best == {"accuracy": 0.5}
