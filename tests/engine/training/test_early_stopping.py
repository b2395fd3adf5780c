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
    assert [stopping.add_validation(i, {objective: v}) for i, v in enumerate(values)] == is_best
    assert stopping.best_step == max(i for i, best in enumerate(is_best) if best)


def test_patience_counts_validations_in_a_row() -> None:
    stopping = EarlyStopping("loss", patience=2)
    found = []
    for step, loss in enumerate([1.0, 1.1, 0.9, 1.0, 1.0]):
        stopping.add_validation(step, {"loss": loss})
        found.append(stopping.is_patience_over)
    assert found == [False, False, False, False, True]


def test_early_stopping_continues_where_another_one_was() -> None:
    first, second = EarlyStopping("accuracy", patience=3), EarlyStopping("accuracy", patience=3)
    first.add_validation(10, {"accuracy": 0.5})
    first.add_validation(20, {"accuracy": 0.4})
    second.load_state_dict(first.state_dict())
    assert not second.add_validation(30, {"accuracy": 0.5})
    assert not second.is_patience_over
    assert not second.add_validation(40, {"accuracy": 0.5})
    assert second.is_patience_over
    assert second.best == {"accuracy": 0.5}
