"""What validations and steps tell: the best, enough, divergence."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from gpupool.core.options.named_measures import less_is_better
from gpupool.core.wire.events import StepEvent
from gpupool.engine.training.early_stopping import EarlyStopping


def steps(
    losses: list[float], accuracies: list[float] | None = None, first: int = 1
) -> list[StepEvent]:
    return [
        StepEvent(first + i, 1, loss, accuracies[i] if accuracies else None, 0.1, 8, 0.0, 0.0)
        for i, loss in enumerate(losses)
    ]


def warned(
    stopping: EarlyStopping, every: list[StepEvent], classes: int = 0, block: int = 10
) -> list[str]:
    """What is said of these steps, reported so many at a time."""
    parts = [every[i : i + block] for i in range(0, len(every), block)]
    return [warning.about for part in parts for warning in stopping.add_steps(part, classes)]


def noisy(level: float, num: int, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [level * (1 + 0.1 * generator.gauss(0, 1)) for _ in range(num)]


@pytest.mark.parametrize(
    ("objective", "values", "is_best"),
    [
        ("loss", [1.0, 0.5, 0.7, 0.4], [True, True, False, True]),
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


@pytest.mark.parametrize("name", ["loss", "val_loss", "RMSE", "mae", "mse", "huber", "error"])
def test_of_some_values_less_is_better(name: str) -> None:
    assert less_is_better(name)
    assert not less_is_better("f1")


def test_patience_counts_validations_in_a_row() -> None:
    stopping = EarlyStopping("loss", patience=2)
    found = []
    for step, loss in enumerate([1.0, 1.1, 0.9, 1.0, 1.0]):
        stopping.add_validation(step, {"loss": loss})
        found.append(stopping.is_patience_over)
    assert found == [False, False, False, False, True]


@pytest.mark.parametrize("objective", ["loss", "accuracy"])
def test_patience_asks_for_more_than_min_delta_since_the_last_that_counted(objective: str) -> None:
    stopping = EarlyStopping(objective, patience=2, min_delta=0.1)
    sign = 1 if objective == "loss" else -1
    found = []
    for step, value in enumerate([1.0, 0.95, 0.85, 0.8, 0.78]):
        is_best = stopping.add_validation(step, {objective: sign * value})
        assert is_best  # whatever patience says: these weights are the best so far
        found.append(stopping.is_patience_over)
    assert found == [False, False, False, False, True]
    again = EarlyStopping(objective, patience=2, min_delta=0.1)
    again.load_state_dict(stopping.state_dict())
    assert again.state_dict() == stopping.state_dict()


def test_a_loss_that_is_no_number_is_told_once() -> None:
    stopping = EarlyStopping()
    assert stopping.add_steps(steps([1.0, 0.9])) == []
    assert stopping.is_finite
    (warning,) = stopping.add_steps(steps([0.8, math.nan, math.inf], first=3))
    assert (warning.about, warning.step) == ("not finite", 4)
    assert "Loss became NaN at step 4" in warning.message
    assert not stopping.is_finite
    assert stopping.add_steps(steps([math.nan])) == []


def test_a_spike_is_three_high_steps_in_a_row() -> None:
    stopping = EarlyStopping()
    assert stopping.add_steps(steps(noisy(0.5, 60))) == []
    assert stopping.add_steps(steps([9.0, 9.0, 0.5, 9.0], first=61)) == []
    (warning,) = stopping.add_steps(steps([9.0, 9.0], first=65))
    assert warning.about == "spike"
    assert warning.step == 66
    assert "from about 0.5" in warning.message


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_slow_changes_are_no_spike(seed: int) -> None:
    stopping = EarlyStopping()
    falling = [2.0 * 0.99**i for i in range(300)]
    losses = [a * b for a, b in zip(falling, noisy(1.0, 300, seed), strict=True)]
    rising = [losses[-1] * 1.01**i for i in range(100)]
    for i in range(0, 300, 10):
        assert stopping.add_steps(steps(losses[i : i + 10])) == []
    for i in range(0, 100, 10):
        assert stopping.add_steps(steps(rising[i : i + 10])) == []


def test_chance_after_better_is_told() -> None:
    stopping = EarlyStopping()
    assert stopping.add_steps(steps([1.0] * 40, [0.6] * 40), num_classes=10) == []
    _, warning = stopping.add_steps(steps([2.3] * 40, [0.094] * 40), num_classes=10)
    assert warning.about == "chance"
    assert "no better than chance (10 classes)" in warning.message


def test_chance_with_a_loss_that_is_worse_than_guessing_is_told() -> None:
    stopping = EarlyStopping()
    (warning,) = stopping.add_steps(steps([40.0] * 60, [0.094] * 60), num_classes=10)
    assert warning.about == "chance"
    assert "does not fall from 40. Check labels" in warning.message
    assert "diverges" not in warning.message  # it never was better


def test_chance_in_the_beginning_is_not() -> None:
    stopping = EarlyStopping()
    assert stopping.add_steps(steps([2.3] * 100, [0.1] * 100), num_classes=10) == []


def test_early_stopping_continues_where_another_one_was() -> None:
    first, whole = EarlyStopping("accuracy", patience=3), EarlyStopping("accuracy", patience=3)
    for stopping in (first, whole):
        stopping.add_validation(10, {"accuracy": 0.5})
        stopping.add_validation(20, {"accuracy": 0.4})
        stopping.add_steps(steps(noisy(0.5, 60), [0.5] * 60), num_classes=10)
    second = EarlyStopping("accuracy", patience=3)
    second.load_state_dict(first.state_dict())
    later = steps([9.0] * 4 + noisy(2.3, 40), [0.09] * 44, first=61)
    assert second.add_steps(later, 10) == whole.add_steps(later, 10)
    assert not second.add_validation(30, {"accuracy": 0.5})
    assert not second.add_validation(40, {"accuracy": 0.5})
    assert second.is_patience_over


@pytest.mark.parametrize("block", [1, 50])
def test_what_is_usual_is_no_spike_however_many_steps_are_reported_at_once(block: int) -> None:
    generator = random.Random(6)
    near_zero = [1e-4 * math.exp(generator.gauss(0, 1)) for _ in range(500)]
    waves = [math.exp(2 * math.sin(i / 60) + generator.gauss(0, 0.3)) for i in range(1000)]
    around_zero = [math.sin(i / 20) + generator.gauss(0, 0.3) for i in range(500)]
    for losses in (near_zero, waves, around_zero):
        assert warned(EarlyStopping(), steps(losses), block=block) == []


def test_a_warm_restart_is_no_spike_and_a_jump_without_one_is() -> None:
    losses = [*noisy(0.05, 100), *noisy(0.5, 20), *noisy(0.05, 100)]
    rates = [1e-3] * 100 + [0.1] * 20 + [1e-3] * 100
    restarted = [replace(s, lr=lr) for s, lr in zip(steps(losses), rates, strict=True)]
    assert warned(EarlyStopping(), restarted) == []
    assert warned(EarlyStopping(), steps(losses)) == ["spike"]


@pytest.mark.parametrize(("classes", "batch"), [(10, 2), (100, 8), (1000, 16), (20_000, 64)])
def test_luck_while_nothing_is_learnt_yet_is_not_better_than_chance(
    classes: int, batch: int
) -> None:
    generator = random.Random(0)
    right = [sum(generator.random() < 1 / classes for _ in range(batch)) for _ in range(2000)]
    losses = [math.log(classes)] * len(right)
    every = [replace(s, num_samples=batch) for s in steps(losses, [n / batch for n in right])]
    assert warned(EarlyStopping(), every, classes) == []


def test_a_loss_that_falls_from_far_above_guessing_is_not_chance() -> None:
    losses = [2.3 + 10 * math.exp(-i / 40) for i in range(100)]
    assert warned(EarlyStopping(), steps(losses, [0.1] * 100), 10) == []


@pytest.mark.parametrize("block", [1, 2, 6])
def test_a_loss_that_grows_from_the_start_is_told_in_the_first_steps(block: int) -> None:
    stopping, losses = EarlyStopping(), [3.0, 2.5, 50.0, 70.0, 40.0, 90.0]
    warnings = []
    for start in range(0, len(losses), block):
        warnings += stopping.add_steps(steps(losses[start : start + block], first=start + 1))
    assert [(warning.about, warning.step) for warning in warnings] == [("spike", 5)]
    assert "from about 3 to 40" in warnings[0].message
