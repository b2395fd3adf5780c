"""What a loop of the user's has reported, and what of it goes to the browser."""

from __future__ import annotations

import math
from dataclasses import replace

from gpupool.core.wire.events import MonitorEvent
from gpupool.notebook.monitor.loop_history import LoopHistory, LoopState
from gpupool.notebook.monitor.picture import history_html, state_of

GROUPS = {"Losses": ["train", "held out"], "rate": ["rate"], "norm": ["norm"]}


def event(
    *steps: int, groups: dict[str, list[str]] = GROUPS, status: str = "running"
) -> MonitorEvent:
    """News of these steps."""
    rows = [(step, 0.1 * step, {"train": 1 / step, "rate": math.nan}) for step in steps]
    return MonitorEvent(1, "Mine", 0, 2, groups, {"epoch": "3"}, status, True, 1.5, rows)


def test_points_go_once_and_only_finite_ones() -> None:
    history = LoopHistory(event())
    state = LoopState(history)
    history.add(event(1, 2))
    _, new = state.take(history, history.status)
    assert new == {"0": {"0": [(1, 1.0), (2, 0.5)], "1": []}, "1": {"0": []}, "2": {"0": []}}
    history.add(event(4))
    assert state.take_points(history)[1]["0"]["0"] == [(4, 0.25)]
    assert state_of(history).whole()["0"]["0"] == [(1, 1.0), (2, 0.5), (4, 0.25)]  # for another


def test_values_of_a_loop_are_readable_beside_an_outlier_and_as_shares() -> None:
    history = LoopHistory(event(groups={"Loss": ["train"], "accuracy": ["accuracy"]}))
    rows = [(n, 0.1, {"train": 2.0 / n, "accuracy": 0.97 + n / 5000}) for n in range(1, 31)]
    rows += [(31, 0.1, {"train": 1e31, "accuracy": math.nan})]
    groups = {"Loss": ["train"], "accuracy": ["accuracy"]}
    history.add(replace(event(groups=groups), rows=rows))
    y_axes = state_of(history).view["axes"]["y"]
    assert y_axes["0"]["clipped"] == [(31, 1e31)]
    assert y_axes["0"]["high"] <= 5
    assert (y_axes["1"]["low"], y_axes["1"]["high"]) == (0.94, 1.0)
    assert ">1e31<" in history_html(history)


def test_only_plots_of_several_lines_have_a_legend_and_no_end_is_made_up() -> None:
    history = LoopHistory(event(), hears_stop=True)
    history.add(event(1, 2, 3))
    view = state_of(history).view
    assert [entry["label"] for entry in view["legend"]] == ["train", "held out"]
    assert (view["progress"], view["remaining"]) == (None, "step 3")
    assert (view["headline"], view["stop_label"]) == ("Mine", "Stop")
    assert dict(view["table"])["Loop"][0] == ("epoch", "3")
    assert "stop button of the notebook" in history_html(history)
    history.end()
    view = state_of(history).view
    assert (view["headline"], view["stop_label"], view["hint"]) == ("Mine: ended", "", "")
    assert history.line().endswith(", ended")
