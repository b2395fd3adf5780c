"""What is told of trainings and loops, ordinary and odd ones, in every view; never a password."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from torch import nn

import gpupool
from gpupool.core.wire.events import (
    CheckpointEvent,
    DataEvent,
    EndEvent,
    Event,
    MonitorEvent,
    RankEvent,
    StartEvent,
    StepEvent,
    ValidationEvent,
)
from gpupool.notebook.monitor import words
from gpupool.notebook.monitor.loop_history import LoopHistory, LoopState
from gpupool.notebook.monitor.picture import history_html, state_of, training_text
from gpupool.notebook.monitor.plots import Plots
from gpupool.notebook.monitor.result_view import (
    comparison_html,
    result_html,
    validation_html,
    validation_text,
)
from gpupool.training.history import TrainingHistory
from gpupool.training.result import TrainingResult
from tests.support.pools import Pools
from tests.support.trainings import network, samples, train_on

CANARY = "c4n4ry"
MARKUP = "</script><b>bold & 'quoted' \"metric\"</b>"
LONG = [f"{MARKUP} a_name_that_is_longer_than_any_plot_is_wide_{n}" for n in range(12)]
START = StartEvent(2, 4, 32, 8, 2, "CPU", "gloo", ranks=(0, 1), devices=("CPU", "CPU"))
STEP = StepEvent(1, 1, 0.5, None, 0.1, 8, 0.1, 0.0)


def history_of(events: Iterable[Event], **told: str) -> TrainingHistory:
    history = TrainingHistory(options=told)
    for event in events:
        history.add(event)
    return history


def rows(history: TrainingHistory) -> dict[str, str]:
    return {label: value for _, section in words.table(history) for label, value in section}


# ---- rows --------------------------------------------------------------------------------------


def test_there_is_a_row_for_what_was_told_and_none_for_what_was_not() -> None:
    read = DataEvent(1, 1, 2, "503 SlowDown", 1, {"s3://a/1.jpg": "damaged"}, "8 workers")
    told = {
        "Read by": "8 workers",
        "Reads retried": "2 (503 SlowDown)",
        "Samples skipped": "1",
        "Checkpoint": "after step 1",
    }
    assert rows(history_of([START, STEP, read, CheckpointEvent(1, "s3://a/b")])).items() >= (
        told.items()
    )
    shown = rows(history_of([START, STEP]))
    assert not {"Validation loss", "Patience", "Resumed", "Training accuracy", *told} & {*shown}


def test_a_metric_has_one_row_and_shares_are_in_percent() -> None:
    start = replace(START, validate_every=4, metrics=("accuracy", "f1", "rmse"), objective="f1")
    metrics = {"accuracy": 0.75, "f1": 0.875, "rmse": 0.875}
    event = ValidationEvent(1, 1, 0.5, 0.75, 8, 0.2, metrics, is_best=True)
    wanted = {
        "Validation accuracy": "75.0 %",
        "Validation loss": "0.5",
        "Validation f1": "87.5 %",
        "Validation rmse": "0.875",
        "Best validation": "f1 87.5 % after step 1",
    }
    shown = rows(history_of([start, replace(STEP, accuracy=0.5), event]))
    assert {name: value for name, value in shown.items() if "alidation" in name} == wanted
    # Where the steps have no accuracy, that of the metric is the only one.
    other = history_of([start, STEP, replace(event, accuracy=None)])
    assert rows(other)["Validation accuracy"] == "75.0 %"
    said = "loss 0.5, accuracy 75.0 %, f1 87.5 %, rmse 0.875"
    assert validation_text(event) == f"Validation after step 1 (epoch 1): {said}"


def test_patience_counts_validations_since_the_best() -> None:
    events: list[Event] = [replace(START, validate_every=1, patience=3)]
    for number, is_best in enumerate([True, False, False], start=1):
        events.append(replace(STEP, step=number))
        events.append(ValidationEvent(number, 1, 0.5, None, 8, 0.1 * number, {}, is_best))
    assert rows(history_of(events))["Patience"] == "2 of 3"
    assert rows(history_of(events[:3]))["Patience"] == "0 of 3"


@pytest.mark.parametrize(
    ("work_ms", "slowest"),
    [
        ((20, 20, 30), (2, pytest.approx(0.5))),
        ((20, 20, 22), None),  # 10 % longer
        ((2, 2, 4), None),  # 2 ms of 50
        ((20,), None),
        ((40, 10), (0, pytest.approx(3.0))),
    ],
)
def test_the_slowest_is_one_that_the_others_wait_for(
    work_ms: tuple[int, ...], slowest: tuple[int, float] | None
) -> None:
    told = [RankEvent(rank, 1, work / 1000, 0.05) for rank, work in enumerate(work_ms)]
    assert history_of(told).slowest == slowest


# ---- odd ones in every view --------------------------------------------------------------------

# name: the losses, the number of ranks, the names of metrics
COURSES: dict[str, tuple[list[float], int, list[str]]] = {
    "no step": ([], 2, []),
    "one step that is nan": ([math.nan], 2, []),
    "nan and huge": ([1.0, 0.5, 1e31, -1e308, math.nan, math.inf, 0.4], 2, []),
    "many metrics": ([1.0, 0.5], 2, LONG),
    "64 ranks": ([1.0, 0.5], 64, []),
    "unknown length": ([1.0, 0.5], 1, []),
}


def course(name: str) -> TrainingHistory:
    """A step and a validation for each loss, and a report of each rank."""
    losses, num_ranks, names = COURSES[name]
    metrics, ranks = dict.fromkeys(names, 0.5), tuple(range(num_ranks))
    is_known = name != "unknown length"
    events: list[Event] = [
        StartEvent(
            2, 4 * is_known, 32 * is_known, 8, num_ranks, "CPU", "gloo", ranks=ranks,
            devices=("CPU",) * num_ranks, validate_every=1, metrics=tuple(names),
            started_at=1.8e9, objective="loss",
        )
    ]  # fmt: skip
    for step, loss in enumerate(losses, start=1):
        events.append(StepEvent(step, 1, loss, 0.5, 0.1, 8, 0.1 * step, 0.01))
        events.append(ValidationEvent(step, 1, loss, 0.5, 8, 0.1 * step, metrics, step == 1))
        events += [RankEvent(rank, step, 0.05, 0.1, 0.5) for rank in ranks]
    events.append(EndEvent("user", len(losses), 0.1 * len(losses)))
    return history_of(events, objective=repr(MARKUP))


def views(history: TrainingHistory) -> dict[str, str]:
    """All that a user sees of a training, by what it is called."""
    result = TrainingResult(nn.Linear(2, 2), history, gpupool.TrainingOptions())
    compared, state = gpupool.compare(history, history), state_of(history)
    found = {
        "still": history_html(history),
        "text": training_text(history),
        "line": repr(history),
        "state": json.dumps([state.view, state.whole()], allow_nan=False),
        "plot": Plots(state.view, state.whole()).html(as_picture=False),
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
    history = course(name)
    for view, shown in views(history).items():
        assert shown, view
        if view in ("result", "compared", "best", "plot"):
            assert "<b>bold" not in shown, view
            ElementTree.fromstring(f"<div>{shown}</div>")
        if view == "still":
            assert shown.count("</script>") == shown.count("<script")
            assert "<b>bold" not in re.sub(r"<script.*?</script>", "", shown, flags=re.DOTALL)
    pytest.importorskip("pandas")
    assert len(history.to_frame()) == len(COURSES[name][0])


def test_long_names_of_metrics_differ_in_the_table_and_above_the_plots() -> None:
    history = course("many metrics")
    (results,) = (rows for title, rows in words.table(history) if title == "Results")
    labels = [label for label, _ in results]
    assert len(set(labels)) == len(labels) == 4 + 12 + 2
    assert max(map(len, labels)) <= words.MAX_LABEL_CHARS
    titles = [plot["title"] for plot in state_of(history).view["plots"]]
    assert len(set(titles)) == len(titles) == 2 + 12


@pytest.mark.long
@pytest.mark.parametrize("end", ["me:{}@host/run", "host/run?X-Amz-Signature={}%2Fx&v=1"])
def test_no_view_shows_a_password_of_an_options_url(pools: Pools, end: str) -> None:
    training, url = (network(), samples(16)), f"memory://{end.format(CANARY)}"
    result = train_on(pools[1], *training, batch_size=8, epochs=1, checkpoint=url)
    other = train_on(pools[1], *training, batch_size=8, epochs=1)
    shown, compared = views(result.history), gpupool.compare(result, other)
    assert "***" in shown["still"] + shown["result"]
    assert CANARY not in str(shown) + repr(result.options) + str(result.checkpoint)
    assert compared.columns[:2] == ("", "checkpoint")
    table = f"{compared!r}{comparison_html(compared)}"
    assert "***" in table
    assert CANARY not in table + result.history.to_frame().to_csv()


# ---- a loop of the user's own ------------------------------------------------------------------

GROUPS = {"Losses": ["train", "held out"], "rate": ["rate"], "norm": ["norm"]}


def news(*steps: int) -> MonitorEvent:
    rows = [(step, 0.1 * step, {"train": 1 / step, "rate": math.nan}) for step in steps]
    return MonitorEvent(1, "Mine", 0, 2, GROUPS, {"epoch": "3"}, "running", True, 1.5, rows)


def test_points_of_a_loop_go_once_and_only_finite_ones() -> None:
    history = LoopHistory(news())
    state = LoopState(history)
    history.add(news(1, 2))
    _, new = state.take(history, history.status)
    assert new == {"0": {"0": [(1, 1.0), (2, 0.5)], "1": []}, "1": {"0": []}, "2": {"0": []}}
    history.add(news(4))
    assert state.take_points(history)[1]["0"]["0"] == [(4, 0.25)]
    assert state_of(history).whole()["0"]["0"] == [(1, 1.0), (2, 0.5), (4, 0.25)]  # for another


def test_only_plots_of_several_lines_have_a_legend_and_no_end_is_made_up() -> None:
    history = LoopHistory(news(), hears_stop=True)
    history.add(news(1, 2, 3))
    view = state_of(history).view
    assert [entry["label"] for entry in view["legend"]] == ["train", "held out"]
    assert (view["progress"], view["remaining"]) == (None, "step 3")
    assert (view["headline"], view["stop_label"]) == ("Mine", "Stop")
    assert dict(view["table"])["Loop"][0] == ("epoch", "3")
    history.end()
    view = state_of(history).view
    assert (view["headline"], view["stop_label"], view["hint"]) == ("Mine: ended", "", "")
    assert history.line().endswith(", ended")
