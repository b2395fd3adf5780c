"""The final picture of a training, as a reader of the notebook meets it."""

from __future__ import annotations

import gzip
import math
import re
import xml.etree.ElementTree as ET
from base64 import b64decode
from collections.abc import Callable
from urllib.parse import unquote

import pytest
from IPython.core.interactiveshell import InteractiveShell

from gpupool.core.wire.events import StepEvent
from gpupool.notebook import formatters
from gpupool.notebook.drawing.axes import nice_axis
from gpupool.notebook.monitor.curves import Curve, Curves
from gpupool.notebook.monitor.picture import history_html, training_text
from gpupool.training.history import TrainingHistory
from tests.notebook.feed import full_events

SVG = "{http://www.w3.org/2000/svg}"
HistoryOf = Callable[..., TrainingHistory]


def page_of(html: str) -> ET.Element:
    """What is there without scripts and style sheets, which is XML too."""
    return ET.fromstring(re.sub(r"<(script|style).*?</\1>", "", html, flags=re.DOTALL))


def script_of(html: str) -> str:
    """What the page's script unpacks."""
    (packed,) = re.findall('atob\\("([^"]*)"', html)
    return gzip.decompress(b64decode(packed)).decode()


def read(html: str) -> str:
    """The text of the page and of its picture, one space between words."""
    page = page_of(html)
    words = [*page.itertext(), *(drawing(html).itertext() if "<img" in html else ())]
    return re.sub(r"\s+", " ", " ".join(words))


def drawing(html: str) -> ET.Element:
    """The plots: in the picture of a training that is over, else in the page itself."""
    page = page_of(html)
    picture = page.find(".//img")
    if picture is None:
        return next(svg for svg in page.iter(f"{SVG}svg") if svg.get("role") == "img")
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


def test_the_best_is_ringed_in_both_plots_and_its_label_stays_inside() -> None:
    for num_epochs in (2, 3, 6):
        html = history_html(full(num_epochs=num_epochs))
        rings = [c for c in drawing(html).iter(f"{SVG}circle") if c.get("r") == "6.5"]
        assert len(rings) == 2
        labels = [t for t in drawing(html).iter(f"{SVG}text") if (t.text or "").startswith("best ")]
        assert len(labels) == 2
        for label, left in zip(labels, (0, 444), strict=True):
            x, y = float(label.get("x", "")), float(label.get("y", ""))
            width = 6.2 * len(label.text or "") * (1 if label.get("text-anchor") == "start" else -1)
            assert left + 46 < x + width < left + 402
            assert 38 < y < 38 + 176
    assert "best" in read(html)


def test_a_table_shows_how_each_rank_fared() -> None:
    page = page_of(history_html(full()))
    rows = [
        " ".join(row.itertext()) for row in page.findall(".//details[@class='gpm-ranks']//tbody/tr")
    ]
    words_ = " ".join(rows[2].split())
    assert words_ == "2 cuda:2 H200 71 % 57 of 139 GiB 60 °C 71 ms slowest +37 %"
    assert sum("slowest" in row for row in rows) == 1
    assert "rank 2 is the slowest +37 %" in training_text(full())


def test_a_training_that_goes_on_is_drawn_in_the_page() -> None:
    html = history_html(full(num_steps=200))
    assert "<img" not in html
    assert "<script" not in html
    assert len(lines(html)) == 6


def test_the_picture_needs_nothing_from_elsewhere(history_of: HistoryOf) -> None:
    html = history_html(history_of()).replace("http://www.w3.org/2000/svg", "")  # its name
    assert "http" not in html
    assert "url(" not in html
    assert not re.search(r"\b(import|fetch|eval|XMLHttpRequest)\b", html + script_of(html))
    assert set(re.findall('(?:src|href)="([^,]*)', html)) == {"data:image/svg+xml"}


@pytest.mark.parametrize("num_points", [1, 12_345])
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


def test_nan_and_infinity_leave_a_gap() -> None:
    history = TrainingHistory()
    for step, loss in enumerate([1.0, math.nan, math.inf, 5.0], start=1):
        history.add(StepEvent(step, 1, loss, None, 0.1, 8, step, 0.0))
    curves = Curves()
    assert curves.take(history)["loss"]["raw"] == [(1, 1.0), (4, 5.0)]
    assert curves.whole()["loss"]["mean"] == [(1, 1.0, 1), (4, 5.0, 1)]


def test_only_what_is_new_is_taken(history_of: HistoryOf) -> None:
    history, curves = history_of(num_steps=10), Curves()
    curves.take(history)
    history.add(StepEvent(11, 1, 0.5, 0.25, 0.1, 512, 1.0, 0.0))
    new = curves.take(history)
    assert new["loss"]["raw"] == [(11, 0.5)]
    assert new["loss"]["mean"] == [(11, 0.5, 1)]
    assert new["accuracy"]["raw"] == [(11, 25.0)]
    assert new["accuracy"]["validation"] == []


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 2.4, "0 0.5 1 1.5 2 2.5"),
        (0, 6e-5, "0 2e-5 4e-5 6e-5"),
        (-3, 1, "-3 -2 -1 0 1"),
    ],
)
def test_loss_axes_have_round_ticks(low: float, high: float, labels: str) -> None:
    axis = nice_axis(low, high)
    assert " ".join(label for _, label in axis["ticks"]) == labels
    assert axis["low"] <= low
    assert high <= axis["high"]


def test_what_plot_gives_is_shown_as_the_picture(history_of: HistoryOf) -> None:
    shell = InteractiveShell()
    formatters.register(shell)
    history = history_of()
    bundle, _ = shell.display_formatter.format(history)  # type: ignore[union-attr]
    assert bundle["text/html"] == history_html(history)
    assert bundle["text/plain"] == training_text(history)
