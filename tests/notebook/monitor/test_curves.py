"""The curves of a training: means and smoothing without bias, metrics, and what is no course."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from dataclasses import replace

import pytest

from gpupool.core.wire.events import EndEvent, StartEvent, StepEvent, ValidationEvent
from gpupool.notebook.monitor.curves import Curve, smoothed
from gpupool.notebook.monitor.picture import history_html, state_of
from gpupool.training.history import TrainingHistory
from tests.notebook.monitor.test_picture import drawing, lines

START = StartEvent(200, 500, 4000, 8, 1, "CPU", "none", validate_every=500)
NAMES = (
    "accuracy",
    "top5",
    "mask/mean_iou",
    "mae",
    "loss",
    "__proto__",
    "a metric with a name of forty characters",
    "<b>bold & 'quoted' \"metric\"</b><script>",
    "MulticlassF1Score",
    "rmse",
    "r2",
    "x" * 200,
)


def step(number: int, loss: float, accuracy: float | None = None) -> StepEvent:
    return StepEvent(number, 1, loss, accuracy, 0.1, 8, 0.01 * number, 0.0)


def course(*losses: float, start: StartEvent = START) -> TrainingHistory:
    """A training that goes on, after steps with these losses."""
    history = TrainingHistory()
    history.add(start)
    for number, loss in enumerate(losses, start=1):
        history.add(step(number, loss))
    return history


def ended(history: TrainingHistory) -> TrainingHistory:
    """The same, stopped by the user."""
    history.add(EndEvent("user", len(history.steps), 8.0))
    return history


@pytest.mark.parametrize("num_points", [1, 12_345])
def test_the_means_of_buckets_are_those_of_all_steps(num_points: int) -> None:
    noise = random.Random(0)
    values = [noise.random() for _ in range(num_points)]
    curve = Curve(600)
    for number, value in enumerate(values, start=1):
        curve.add(number, value)
    means = curve.means()
    assert len(means) <= 300
    assert sum(count for _, _, count in means) == curve.count == num_points
    assert means[-1][0] == num_points
    total = sum(mean * count for _, mean, count in means)
    assert math.isclose(total, sum(values), rel_tol=1e-4)
    # each is of the steps since the one before it
    done = 0
    for last, mean, count in means:
        assert mean == pytest.approx(statistics.fmean(values[done:last]), rel=1e-4)
        assert count == last - done
        done = last


def test_smoothing_has_no_bias_towards_the_first_value() -> None:
    noise = random.Random(0)
    flat = [(number, 5.0, 1) for number in range(1, 100)]
    assert {round(value, 9) for _, value in smoothed(flat, 10)} == {5.0}
    # As many values above as below: what is first must not count for more.
    first_is_odd = [(number, 5.0 if number > 1 else 9.0, 1) for number in range(1, 60)]
    assert smoothed(first_is_odd, 5)[30][1] == pytest.approx(5.0, abs=0.02)
    noisy = [(number, 0.75 + noise.uniform(-0.2, 0.2), 1) for number in range(1, 13)]
    assert smoothed(noisy, 50)[-1][1] == pytest.approx(
        statistics.fmean(value for _, value, _ in noisy), abs=0.01
    )


def test_a_training_stopped_early_fills_its_picture() -> None:
    history = course(*(2.3 * 0.999**n for n in range(2000)))
    running = state_of(history).view["axes"]["steps"]
    assert (running["low"], running["high"], running["plan"]) == (0, 2500, 100_000)
    html = history_html(ended(history))  # after 2 % of the plan
    right = max(x for line in lines(html) for x, _ in line)
    assert right == 642.0
    axes = state_of(history).view["axes"]
    assert (axes["steps"]["high"], axes["steps"]["plan"]) == (2000, 100_000)
    assert [label for _, _, label in axes["bands"]] == ["Epoch 1", "2", "3", "4"]


@pytest.mark.parametrize("huge", [1e31, 1e308])
def test_a_huge_loss_and_nan_leave_the_others_readable(huge: float) -> None:
    good = [2.3 - 0.05 * n for n in range(20)]
    history = ended(course(*good, huge, math.nan))
    state = state_of(history)
    axis = state.view["axes"]["y"]["loss"]
    assert axis["clipped"] == [(21, min(huge, 1e300))]
    assert axis["high"] <= 5
    json.loads(state.lines(), parse_constant=pytest.fail)
    json.loads(json.dumps(state.view), parse_constant=pytest.fail)
    raw, smooth, _ = lines(history_html(history))
    heights = [y for _, y in raw[:20]]
    assert max(heights) - min(heights) > 25
    assert all(38 <= y <= 214 for _, y in (*raw, *smooth))  # nothing leaves the plot
    shown = ["".join(text.itertext()) for text in drawing(history_html(history)).iter()]
    assert f"{min(huge, 1e300):g}".replace("+", "") in shown


def test_twelve_metrics_have_a_small_plot_each_in_two_columns() -> None:
    history = course(start=replace(START, metrics=NAMES))
    names = [plot["name"] for plot in state_of(history).view["plots"]]
    # before any value, as nothing may jump; "accuracy" has a plot already
    assert names == ["accuracy", "loss", *(f"metric:{name}" for name in NAMES[1:])]
    for number in (500, 1000):
        history.add(step(number, 1.0, 0.5))
        values = {name: (0.25 + number / 2000) * (7 if "mae" in name else 1) for name in NAMES}
        history.add(ValidationEvent(number, 1, 1.0, 0.5, 10, 1.0, values))
    state = state_of(ended(history))
    assert [plot["name"] for plot in state.view["plots"]] == names
    of = {plot["name"]: plot for plot in state.view["plots"]}
    shares = {name for name, plot in of.items() if plot["unit"] == "%"}
    assert shares == {"accuracy", "metric:top5", "metric:mask/mean_iou", "metric:MulticlassF1Score"}
    whole = state.whole()
    assert whole["metric:top5"]["validation"] == [(500, 50.0), (1000, 75.0)]
    assert whole["metric:mae"]["validation"] == [(500, 3.5), (1000, 5.25)]
    best = state.view["axes"]["best"]
    assert (best["metric:top5"]["label"], best["metric:top5"]["step"]) == ("best 75.0 %", 1000)
    assert (best["metric:mae"]["label"], best["metric:mae"]["step"]) == ("best 3.5", 500)
    latest = "top5 at step 1000: 75.0 %, best 75.0 % at step 1000"
    assert state.view["latest"]["metric:top5"] == latest

    page = history_html(history)
    assert "<b>bold" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    titles = [one for one in drawing(page).iter() if one.get("font-weight") == "600"]
    assert len(titles) == len(names)
    assert {title.get("x") for title in titles} == {"0.0", "444.0"}
    assert all(len(title.text or "") <= 52 for title in titles)
