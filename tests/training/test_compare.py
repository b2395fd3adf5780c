"""Trainings side by side: a table and a picture; a history as a frame."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

import gpupool
from gpupool import TrainingError
from gpupool.notebook.comparison_view import comparison_html
from gpupool.training.compare import COLUMNS, smoothed
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on


@pytest.mark.long
def test_trainings_stand_side_by_side(pools: Pools) -> None:
    data = samples(60)
    one = train_on(pools[1], network(), data, epochs=3, batch_size=10, validation=data)
    two = train_on(pools[2], network(), data, epochs=2, batch_size=20)
    found = gpupool.compare(one, two.history)
    assert found.differences() == {"epochs": ("3", "2"), "batch_size": ("10", "20")}
    assert found.names == (
        "1: 1 rank, epochs=3, batch_size=10",
        "2: 2 ranks, epochs=2, batch_size=20",
    )
    assert found.header()[:4] == ("", "epochs", "batch_size", "Ranks")
    assert found.table()[1][:4] == ("2", "2", "20", "2")
    table = [dict(zip(COLUMNS, row, strict=True)) for row in found.rows()]
    assert [row["Steps"] for row in table] == ["18", "6"]
    assert [row["Batch"] for row in table] == ["10", "20"]
    assert "%)" in table[1]["Per second"]
    assert "after step" in table[0]["Best"]
    assert len(repr(found).splitlines()) == 3
    assert repr(found).splitlines()[1].split()[:3] == ["1", "3", "10"]
    alike = gpupool.compare(one, one)
    assert (alike.differences(), alike.names) == ({}, ("1: 1 rank", "2: 1 rank"))
    html = comparison_html(gpupool.compare(one, two, names=["few <b>", "many"]))
    assert "<b>few" not in html
    assert "few &lt;b&gt;" in html
    ElementTree.fromstring(html)
    assert html.count("<img") == 2  # over time, and over steps
    assert gpupool.compare(one, two, names=["few", "many"]).table()[0][0] == "few"
    assert len(html) < 60_000

    with raises(TrainingError):
        gpupool.compare(one, {"loss": 3})
    with raises(TrainingError, "names"):
        gpupool.compare(one, two, names=["one"])
    values = smoothed(one.history, "loss")
    assert values[0] == one.history.steps[0].loss
    assert len(values) == 18


def test_a_history_is_a_frame_with_a_row_for_each_step(pools: Pools) -> None:
    pytest.importorskip("pandas")
    data = samples(60)
    result = train_on(
        pools[2],
        network(),
        data,
        epochs=2,
        batch_size=20,
        validation=samples(20, seed=1),
        metrics=["f1"],
    )
    frame = result.history.to_frame()
    assert list(frame.index) == [1, 2, 3, 4, 5, 6]
    assert frame.loss.tolist() == [step.loss for step in result.history.steps]
    assert result.best is not None
    assert frame.validation_f1.dropna().tolist() == [
        event.metrics["f1"] for event in result.history.validations
    ]
    assert math.isnan(frame.validation_loss[1])
    assert frame.validation_accuracy[3] == result.history.validations[0].accuracy
    assert gpupool.TrainingHistory().to_frame().empty
