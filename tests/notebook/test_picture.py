"""The final picture of a training, as a reader of the notebook meets it."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable

import pytest

from gpupool.core.events import EndEvent, StepEvent
from gpupool.notebook import words
from gpupool.notebook.curves import Curve, Curves, epoch_bands, nice_axis, step_ticks
from gpupool.notebook.picture import training_html, training_text
from gpupool.training.history import TrainingHistory

SVG = "{http://www.w3.org/2000/svg}"
HistoryOf = Callable[..., TrainingHistory]


def read(html: str) -> str:
    """The text of the page, one space between words."""
    return re.sub(" +", " ", " ".join(ET.fromstring(html).itertext()))


def plots(html: str) -> list[ET.Element]:
    return [svg for svg in ET.fromstring(html).iter(f"{SVG}svg") if svg.get("role") == "img"]


def test_a_reader_sees_the_outcome(history_of: HistoryOf) -> None:
    page = read(training_html(history_of()))
    assert page.startswith("Finished: 6 epochs in 14 s 100 % Accuracy (%)")
    for part in (
        "Epoch 1 2 3 4 5 6",
        "Validation accuracy 89.8 %",
        "Throughput 40\u202f960 images/s",
        "Epoch 6 of 6 Step 900 of 900 Steps per epoch 150",
        "Data Wait 4 % Reads retried – Samples skipped – From the cache – Other",
        "Ranks 4 × cuda Backend nccl Global batch 512 = 4 × 128 Learning rate 0.1",
        "training (smoothed) training validation",
    ):
        assert part in page


def test_two_plots_each_with_three_lines_and_the_latest_values_in_words(
    history_of: HistoryOf,
) -> None:
    accuracy, loss = plots(training_html(history_of()))
    for svg in (accuracy, loss):
        assert [len(line.get("points", "")) > 0 for line in svg.iter(f"{SVG}polyline")] == [
            True
        ] * 3
        assert len(list(svg.iter(f"{SVG}circle"))) == 6
    assert accuracy.get("aria-label") == "Accuracy at step 900: 94.6 %, validation 89.8 %"


def test_without_accuracy_there_is_only_the_loss(history_of: HistoryOf) -> None:
    html = training_html(history_of(with_accuracy=False))
    assert len(plots(html)) == 1
    assert "ccuracy" not in html


@pytest.mark.parametrize("state", ["starting", "failed", "half way"])
def test_unfinished_trainings_are_drawn_too(history_of: HistoryOf, state: str) -> None:
    history = history_of(num_steps=400) if state == "half way" else TrainingHistory(status=state)
    history.error = "ValueError: <b>no</b> images & no labels"
    page = read(training_html(history))
    expected = {
        "starting": "Starting",
        "failed": "Failed: ValueError: <b>no</b> images & no labels",
        "half way": "Training: epoch 3 of 6 44 % · less than 10 s left",
    }
    assert page.startswith(expected[state])


def test_a_long_training_stays_small_and_keeps_its_spike(history_of: HistoryOf) -> None:
    history = history_of(num_epochs=40, steps_per_epoch=250, spike_at=7777)
    html = training_html(history)
    assert len(html.encode()) < 60_000
    _, loss = plots(html)
    raw = loss.find(f"{SVG}polyline")
    assert raw is not None
    heights = [float(pair.split(",")[1]) for pair in raw.get("points", "").split()]
    assert min(heights) < 40 < sorted(heights)[1]  # one point alone near the top


def test_the_picture_needs_nothing_from_elsewhere(history_of: HistoryOf) -> None:
    html = training_html(history_of())
    assert "<script" not in html
    assert set(re.findall(r"https?://[^\"']+", html)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in html
    assert "src=" not in html


def test_the_text_has_the_outcome_in_a_few_lines(history_of: HistoryOf) -> None:
    assert training_text(history_of()).splitlines() == [
        "Finished: 6 epochs in 14 s",
        "  Results:        validation accuracy 89.8 %, validation loss 0.2779, "
        "training accuracy 94.6 %, training loss 0.2579",
        "  Training time:  elapsed 14 s, throughput 40\u202f960 images/s",
        "  Training cycle: epoch 6 of 6, step 900 of 900, steps per epoch 150",
        "  Data:           wait 4 %",
        "  Other:          ranks 4 × cuda, backend nccl, global batch 512 = 4 × 128, "
        "learning rate 0.1",
    ]
    assert training_text(TrainingHistory()) == "Starting"
    assert training_text(TrainingHistory(status="failed", error="")) == "Failed: no message"


def test_a_stopped_training_says_how_far_it_came(history_of: HistoryOf) -> None:
    history = history_of(num_steps=560)
    history.add(EndEvent("user", 560, 8.0))
    assert words.headline(history) == "Stopped after step 560 of 900"
    assert words.remaining(history) == "62 %"


@pytest.mark.parametrize("num_points", [1, 2, 799, 800, 12_345])
def test_a_thinned_curve_keeps_its_extremes_its_ends_and_its_order(num_points: int) -> None:
    curve = Curve(max_points=800)
    values = [math.sin(step / 50) for step in range(1, num_points + 1)]
    values[num_points // 2] = 7.0
    for step, value in enumerate(values, start=1):
        curve.add(step, value)
    points = curve.points()
    assert len(points) <= 800
    assert points == sorted(set(points))
    assert {value for _, value in points} >= {7.0, min(values)}
    assert points[-1] == (num_points, values[-1])
    assert (curve.low, curve.high) == (min(values), 7.0)


def test_nan_leaves_a_gap_and_the_smoothed_line_starts_anew() -> None:
    history = TrainingHistory()
    for step, loss in enumerate([1.0, math.nan, math.inf, 5.0], start=1):
        history.add(StepEvent(step, 1, loss, None, 0.1, 8, step, 0.0))
    curves = Curves()
    assert curves.take(history)["loss"]["raw"] == [(1, 1.0), (4, 5.0)]
    assert curves.whole()["loss"]["smooth"] == [(1, 1.0), (4, 5.0)]


def test_only_what_is_new_is_taken(history_of: HistoryOf) -> None:
    history, curves = history_of(num_steps=10), Curves()
    curves.take(history)
    history.add(StepEvent(11, 1, 0.5, 0.25, 0.1, 512, 1.0, 0.0))
    new = curves.take(history)
    assert new["loss"]["raw"] == [(11, 0.5)]
    assert new["accuracy"]["raw"] == [(11, 25.0)]
    assert new["accuracy"]["validation"] == []


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 2.4, "0 0.5 1 1.5 2 2.5"),
        (0, 0.0031, "0 0.001 0.002 0.003 0.004"),
        (0, 8000, "0 2\u202f000 4\u202f000 6\u202f000 8\u202f000"),
        (-3, 1, "-3 -2 -1 0 1"),
        (0, 0, "0 0.2 0.4 0.6 0.8 1"),
    ],
)
def test_loss_axes_have_round_ticks(low: float, high: float, labels: str) -> None:
    axis = nice_axis(low, high)
    assert " ".join(label for _, label in axis["ticks"]) == labels
    assert axis["low"] <= low
    assert high <= axis["high"]


def test_step_ticks_are_whole_numbers() -> None:
    for num_steps in (1, 2, 5, 7, 11, 150, 12_345):
        ticks = step_ticks(num_steps)
        assert all(isinstance(tick, int) for tick in ticks)
        assert len(ticks) <= 8


def test_many_epochs_share_bands(history_of: HistoryOf) -> None:
    bands = epoch_bands(history_of(num_epochs=90, steps_per_epoch=2, num_steps=1))
    assert [label for _, _, label in bands][:2] == ["Epochs 1–20", "21–40"]
    assert bands[-1] == (160, 180, "81–90")
