"""Trainings of an odd course or with odd names, in every view; passwords that none may show."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from torch import nn

import gpupool
from gpupool.core.wire.events import (
    EndEvent,
    Event,
    RankEvent,
    StartEvent,
    StepEvent,
    ValidationEvent,
)
from gpupool.notebook.monitor import words
from gpupool.notebook.monitor.picture import history_html, state_of, training_text
from gpupool.notebook.monitor.plots import Plots
from gpupool.notebook.monitor.result_view import comparison_html, result_html, validation_html
from gpupool.training.history import TrainingHistory
from gpupool.training.result import TrainingResult
from tests.support.pools import Pools
from tests.support.trainings import network, samples, train_on

CANARY = "c4n4ry"
MARKUP = "</script><b>bold & 'quoted' \"metric\"</b>"
LONG = [f"{MARKUP} a_name_that_is_longer_than_any_plot_is_wide_{n}" for n in range(12)]


def begun(num_ranks: int = 2, metrics: tuple[str, ...] = ()) -> StartEvent:
    ranks = tuple(range(num_ranks))
    return StartEvent(
        2, 4, 32, 8, num_ranks, "CPU", "gloo", ranks=ranks, devices=("CPU",) * num_ranks,
        validate_every=1, metrics=metrics, started_at=1.8e9, objective="loss",
    )  # fmt: skip


def course(losses: list[float], start: StartEvent, end: str = "user") -> Iterator[Event]:
    """A step and a validation for each loss, and a report of each rank."""
    yield start
    metrics = dict.fromkeys(start.metrics, 0.5)
    for step, loss in enumerate(losses, start=1):
        yield StepEvent(step, 1, loss, 0.5, 0.1, 8, 0.1 * step, 0.01)
        yield ValidationEvent(step, 1, loss, 0.5, 8, 0.1 * step, metrics, is_best=step == 1)
        for rank in start.ranks:
            yield RankEvent(rank, step, 0.05, 0.1, 0.5)
    yield EndEvent(end, len(losses), 0.1 * len(losses))


COURSES = {
    "no step": ([], begun()),
    "one step": ([1.0], begun()),
    "one step that is nan": ([math.nan], begun()),
    "nan and huge": ([1.0, 0.5, 1e31, -1e308, math.nan, math.inf, 0.4], begun()),
    "many metrics": ([1.0, 0.5], begun(metrics=tuple(LONG))),
    "64 ranks": ([1.0, 0.5], begun(64)),
    "unknown length": ([1.0, 0.5], replace(begun(1), steps_per_epoch=0, num_samples=0)),
}


def history_of(name: str) -> TrainingHistory:
    history = TrainingHistory(options={"objective": repr(MARKUP)})
    for event in course(*COURSES[name]):
        history.add(event)
    return history


def views(history: TrainingHistory) -> dict[str, str]:
    """All that a user sees of a training, by what it is called."""
    result = TrainingResult(nn.Linear(2, 2), history, gpupool.TrainingOptions())
    compared, state = gpupool.compare(history, history), state_of(history)
    plots = Plots(state.view, state.whole())
    found = {
        "still": history_html(history),
        "text": training_text(history),
        "line": repr(history),
        "state": json.dumps([state.view, state.whole()], allow_nan=False),
        "plot": plots.html(as_picture=False),
        "result": result_html(result),
        "result as text": f"{result}\n{result.best!r}\n{result.warnings}",
        "compared": comparison_html(compared),
        "compared as text": repr(compared),
    }
    if history.best is not None:
        found["best"] = validation_html(history.best)
    return found


@pytest.mark.parametrize("name", COURSES)
def test_every_view_shows_it(name: str) -> None:
    history = history_of(name)
    for view, shown in views(history).items():
        assert shown, view
        if view in ("result", "compared", "best", "plot"):
            assert "<b>bold" not in shown, view
            ElementTree.fromstring(f"<div>{shown}</div>")
        if view == "still":
            assert shown.count("</script>") == shown.count("<script")
            outside = re.sub(r"<script.*?</script>", "", shown, flags=re.DOTALL)
            assert "<b>bold" not in outside
    pandas = pytest.importorskip("pandas")
    frame = history.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame) == len(COURSES[name][0])


def test_long_names_of_metrics_differ_in_the_table_and_above_the_plots() -> None:
    history = history_of("many metrics")
    (results,) = (rows for title, rows in words.table(history) if title == "Results")
    labels = [label for label, _ in results]
    assert len(set(labels)) == len(labels) == 4 + 12 + 2
    assert max(map(len, labels)) <= words.MAX_LABEL_CHARS
    titles = [plot["title"] for plot in state_of(history).view["plots"]]
    assert len(set(titles)) == len(titles) == 2 + 12


@pytest.mark.long
def test_no_view_shows_a_password_of_an_options_url(pools: Pools) -> None:
    places = (
        f"memory://me:{CANARY}@host/run",
        f"memory://host/run?X-Amz-Signature={CANARY}%2Fx&v=1",
    )
    for url in places:
        data = samples(16)
        result = train_on(pools[1], network(), data, batch_size=8, epochs=1, checkpoint=url)
        assert "***" in result.history.options["checkpoint"]
        shown = views(result.history)
        assert "***" in shown["still"] + shown["result"]
        assert CANARY not in str(shown) + repr(result.options) + str(result.checkpoint)
        other = train_on(pools[1], network(), data, batch_size=8, epochs=1)
        compared = gpupool.compare(result, other)
        assert compared.columns[:2] == ("", "checkpoint")
        table = f"{compared!r}{comparison_html(compared)}"
        assert "***" in table
        assert CANARY not in table
        assert CANARY not in result.history.to_frame().to_csv()
