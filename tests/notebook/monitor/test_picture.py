"""A training's curves and final picture, as a reader of the notebook meets them."""

from __future__ import annotations

import gzip
import json
import math
import random
import re
import statistics
import xml.etree.ElementTree as ET
from base64 import b64decode
from urllib.parse import unquote

import pytest

from gpupool.core.wire.events import EndEvent, RankEvent, StartEvent, StepEvent
from gpupool.notebook.monitor.curves import Curve, TrainingCurves
from gpupool.notebook.monitor.picture import board_of, history_html
from gpupool.notebook.monitor.plots import fitted_end, step_axis, tick_label, value_axis
from gpupool.training.history import TrainingHistory
from tests.notebook.feed import full_events, history_of

SVG = "{http://www.w3.org/2000/svg}"
START = StartEvent(200, 500, 4000, 8, 1, "CPU", "none", validate_every=500)


def page_of(html: str) -> ET.Element:
    """What is there without scripts and style sheets, which is XML too."""
    return ET.fromstring(re.sub(r"<(script|style).*?</\1>", "", html, flags=re.DOTALL))


def script_of(html: str) -> str:
    (packed,) = re.findall('atob\\("([^"]*)"', html)
    return gzip.decompress(b64decode(packed)).decode()


def drawing(html: str) -> ET.Element:
    picture = page_of(html).find(".//img")
    assert picture is not None
    kind, data = picture.get("src", "").split(",", 1)
    assert kind == "data:image/svg+xml"
    return ET.fromstring(unquote(data))


def lines(html: str) -> list[list[tuple[float, float]]]:
    """The points of each line, in pixels; three a plot."""
    pairs = [line.get("points", "").split() for line in drawing(html).iter(f"{SVG}polyline")]
    return [[tuple(map(float, pair.split(","))) for pair in line] for line in pairs]  # type: ignore[misc]


@pytest.mark.parametrize("num_points", [1, 12_345])
def test_a_thinned_curve_keeps_extremes_ends_order_and_means(num_points: int) -> None:
    noise = random.Random(0)
    values = [round(noise.random(), 4) for _ in range(num_points)]
    values[num_points // 2] = 7.0
    curve, after = Curve(), num_points // 3
    for steps in (range(after), range(after, after + 1), range(after + 1, num_points)):
        curve.extend({n + 1: values[n] for n in steps})  # it grows while it is drawn
    points, means = curve.points(), curve.means()
    assert len(points) <= 300
    assert points == sorted(set(points))
    assert {value for _, value in points} >= {7.0, min(values)}
    assert points[-1] == (num_points, values[-1])
    assert len(means) <= 150
    assert sum(count for _, _, count in means) == num_points
    done = 0
    for last, mean, count in means:  # each is of the steps since the one before it
        assert mean == pytest.approx(statistics.fmean(values[done:last]), rel=1e-4)
        assert count == last - done
        done = last


def test_what_is_drawn_again_and_again_is_what_is_drawn_once() -> None:
    curves, history = TrainingCurves(), TrainingHistory()
    for event in (*full_events(num_steps=400), *full_events(num_epochs=3)):  # it begins again
        history.add(event)
        if isinstance(event, RankEvent):
            board_of(history, curves=curves)
    assert board_of(history, curves=curves) == board_of(history)


def test_a_huge_loss_and_nan_leave_the_others_readable() -> None:
    good = [2.3 - 0.05 * n for n in range(20)]
    losses = enumerate([*good, 1e308, math.nan], start=1)
    steps = [StepEvent(n, 1, loss, None, 0.1, 8, 0.01 * n) for n, loss in losses]
    history = history_of([START, *steps, EndEvent("user", len(steps), 8.0)])
    board = board_of(history)
    assert [number for number, _ in board.plots["lines"]["loss"]["raw"]] == [*range(1, 22)]
    json.loads(json.dumps(board.plots), parse_constant=pytest.fail)
    raw, smooth, _ = lines(history_html(history))
    heights = [y for _, y in raw[:20]]
    assert max(heights) - min(heights) > 25
    assert all(0 <= y <= 176 for _, y in (*raw, *smooth))  # nothing leaves the plot


def test_the_best_is_ringed_in_both_plots_and_its_label_stays_inside() -> None:
    for num_epochs in (2, 3, 6):
        html = history_html(history_of(full_events(num_epochs)))
        rings = [c for c in drawing(html).iter(f"{SVG}circle") if c.get("r") == "6.5"]
        assert len(rings) == 2
        labels = [t for t in drawing(html).iter(f"{SVG}text") if (t.text or "").startswith("best ")]
        assert len(labels) == 2
        for label in labels:
            x, y = float(label.get("x", "")), float(label.get("y", ""))
            width = 6.2 * len(label.text or "") * (1 if label.get("text-anchor") == "start" else -1)
            assert 0 < x + width < 350
            assert 0 < y < 176


def test_a_table_shows_how_each_rank_fared() -> None:
    page = page_of(history_html(history_of(full_events())))
    rows = [
        " ".join(row.itertext()) for row in page.findall(".//details[@class='gpm-ranks']//tbody/tr")
    ]
    words_ = " ".join(rows[2].split())
    assert words_ == "2 cuda:2 H200 71 % 57 of 139 GiB 60 °C 71 ms"


def test_the_picture_needs_nothing_from_elsewhere() -> None:
    html = history_html(history_of(full_events())).replace(
        "http://www.w3.org/2000/svg", ""
    )  # its name
    assert "http" not in html
    assert "url(" not in html
    assert not re.search(r"\b(import|fetch|eval|XMLHttpRequest)\b", html + script_of(html))
    assert set(re.findall('(?:src|href)="([^,]*)', html)) == {"data:image/svg+xml"}
    assert len(html) <= 60_000


# ---- axes ---------------------------------------------------------------------------------------


def test_the_axis_of_steps_ends_a_quarter_ahead_and_at_the_end_with_the_last_step() -> None:
    plan = 100_000
    ends = [fitted_end(now, plan, is_over=False) for now in range(1, plan + 1)]
    assert ends == sorted(ends)
    assert len(set(ends)) < 50
    for now, end in enumerate(ends, start=1):
        assert min(1.25 * now, plan) <= end <= max(10, min(1.75 * now, plan)), now
    for now, planned in ((111, 5000), (2000, plan), (700, 0)):
        assert fitted_end(now, planned, is_over=True) == now
    assert fitted_end(0, plan, is_over=True) == 1
    assert list(step_axis(0, 900).ticks) == [0, 200, 400, 600, 800]
    assert list(step_axis(0, 3).ticks) == [0, 1, 2, 3]


FALLING = [2.3 * math.exp(-n / 100) + 0.2 for n in range(500)]


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([], "0 0.2 0.4 0.6 0.8 1"),
        ([0.5], "0 0.1 0.2 0.3 0.4 0.5"),
        ([6e-5], "0 2e-5 4e-5 6e-5"),
        ([-3, 1], "-3 -2 -1 0 1"),
        ([-3, -3], "-3 -2.8 -2.6 -2.4"),
        (FALLING, "0 0.5 1 1.5 2 2.5"),
        ([98.5, 99.6], "98.5 98.75 99 99.25 99.5 99.75"),  # from 0 it would be flat
        ([*FALLING, 9.0, -9.0], "-10 -5 0 5 10"),  # one that does not stand alone
        ([*FALLING, 15.0], "0 0.5 1 1.5 2 2.5"),
        ([*FALLING, -15.0], "0 0.5 1 1.5 2 2.5"),
        ([*FALLING, 1e300], "0 0.5 1 1.5 2 2.5"),
    ],
)
def test_axes_have_round_ticks_and_what_is_far_off_lies_beyond(
    values: list[float], labels: str
) -> None:
    axis = value_axis(values)
    assert " ".join(map(tick_label, axis.ticks)) == labels
    assert (axis.low, axis.high) == (axis.ticks[0], axis.ticks[-1])
