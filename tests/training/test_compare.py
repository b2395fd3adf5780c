"""Trainings side by side: a table; a history as a frame."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

import gpupool
from gpupool import Pool, TrainingError
from gpupool.notebook.monitor.result_view import comparison_html
from gpupool.training.compare import RESULTS
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on


def test_trainings_stand_side_by_side(pool2: Pool) -> None:
    data = samples(60)
    one = train_on(pool2, network(), data, epochs=3, batch_size=10, validation=data)
    two = train_on(pool2, network(), data, epochs=2, batch_size=20)
    found = gpupool.compare(one, two.history)
    assert found.columns == ("", "epochs", "batch_size", *RESULTS)
    assert [row[:5] for row in found.rows] == [
        ("1", "3", "10", "2", "18"),
        ("2", "2", "20", "2", "6"),
    ]
    last = dict(zip(found.columns, found.rows[1], strict=True))
    assert last["Loss"] == f"{sum(two.history.loss[3:]) / 3:.4g}"
    assert "after step" in found.rows[0][-1]
    assert repr(found).splitlines()[1].split()[:3] == ["1", "3", "10"]
    assert gpupool.compare(one, one).columns == ("", *RESULTS)
    named = gpupool.compare(one, two, names=["few <b>", "many"])
    assert [row[0] for row in named.rows] == ["few <b>", "many"]
    html = comparison_html(named)
    assert "few &lt;b&gt;" in html
    ElementTree.fromstring(html)
    with raises(TrainingError):
        gpupool.compare(one, {"loss": 3})
    with raises(TrainingError, "names"):
        gpupool.compare(one, two, names=["one"])


def test_a_history_is_a_frame_with_a_row_for_each_step(pool2: Pool) -> None:
    pytest.importorskip("pandas")
    data = samples(60)
    result = train_on(
        pool2,
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
