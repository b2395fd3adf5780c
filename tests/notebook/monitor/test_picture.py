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
from collections.abc import Callable
from urllib.parse import unquote

import pytest

from gpupool.core.wire.events import EndEvent, StartEvent, StepEvent
from gpupool.notebook.monitor.board import board_of
from gpupool.notebook.monitor.curves import thinned
from gpupool.notebook.monitor.picture import history_html
from gpupool.training.history import TrainingHistory
from tests.notebook.feed import full_events

SVG = "{http://www.w3.org/2000/svg}"
START = StartEvent(200, 500, 4000, 8, 1, "CPU", "none", validate_every=500)
HistoryOf = Callable[..., TrainingHistory]


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


def page_of(html: str) -> ET.Element:
    """What is there without scripts and style sheets, which is XML too."""
    return ET.fromstring(re.sub(r"<(script|style).*?</\1>", "", html, flags=re.DOTALL))


def script_of(html: str) -> str:
    """What the page's script unpacks."""
    (packed,) = re.findall('atob\\("([^"]*)"', html)
    return gzip.decompress(b64decode(packed)).decode()


def drawing(html: str) -> ET.Element:
    """The plots."""
    picture = page_of(html).find(".//img")
    assert picture is not None
    kind, data = picture.get("src", "").split(",", 1)
    assert kind == "data:image/svg+xml"
    return ET.fromstring(unquote(data))


def lines(html: str) -> list[list[tuple[float, float]]]:
    """The points of each line, in pixels; three a plot."""
    pairs = [line.get("points", "").split() for line in drawing(html).iter(f"{SVG}polyline")]
    return [[tuple(map(float, pair.split(","))) for pair in line] for line in pairs]  # type: ignore[misc]


def full(**arguments: int) -> TrainingHistory:
    history = TrainingHistory()
    for event in full_events(**arguments):
        history.add(event)
    return history


@pytest.mark.parametrize("num_points", [1, 12_345])
def test_a_thinned_curve_keeps_extremes_ends_order_and_means(num_points: int) -> None:
    noise = random.Random(0)
    values = [round(noise.random(), 4) for _ in range(num_points)]
    values[num_points // 2] = 7.0
    points, means = thinned(range(1, num_points + 1), values)
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


def test_a_huge_loss_and_nan_leave_the_others_readable() -> None:
    good = [2.3 - 0.05 * n for n in range(20)]
    history = ended(course(*good, 1e308, math.nan))
    board = board_of(history)
    assert [number for number, _ in board.plots["lines"]["loss"]["raw"]] == [*range(1, 22)]
    json.loads(json.dumps(board.plots), parse_constant=pytest.fail)
    raw, smooth, _ = lines(history_html(history))
    heights = [y for _, y in raw[:20]]
    assert max(heights) - min(heights) > 25
    assert all(0 <= y <= 176 for _, y in (*raw, *smooth))  # nothing leaves the plot


def test_the_best_is_ringed_in_both_plots_and_its_label_stays_inside() -> None:
    for num_epochs in (2, 3, 6):
        html = history_html(full(num_epochs=num_epochs))
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
    page = page_of(history_html(full()))
    rows = [
        " ".join(row.itertext()) for row in page.findall(".//details[@class='gpm-ranks']//tbody/tr")
    ]
    words_ = " ".join(rows[2].split())
    assert words_ == "2 cuda:2 H200 71 % 57 of 139 GiB 60 °C 71 ms"


def test_the_picture_needs_nothing_from_elsewhere(history_of: HistoryOf) -> None:
    html = history_html(history_of()).replace("http://www.w3.org/2000/svg", "")  # its name
    assert "http" not in html
    assert "url(" not in html
    assert not re.search(r"\b(import|fetch|eval|XMLHttpRequest)\b", html + script_of(html))
    assert set(re.findall('(?:src|href)="([^,]*)', html)) == {"data:image/svg+xml"}
    assert len(html) <= 60_000
