"""Confusion matrices: counted on ranks, told in text, drawn in a notebook."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import gpupool
from gpupool import ConfusionMatrix, TrainingError
from gpupool.notebook import formatters
from tests.engine.metrics.tables import Table, Targets
from tests.support.pools import Pools
from tests.support.raising import raises

NUM, CLASSES = 31, 4
SCORES = torch.randn(NUM, CLASSES, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 3, (NUM,), generator=torch.Generator().manual_seed(1))


def counted(predicted: Any, actual: Any, num: int) -> list[list[int]]:
    counts = np.zeros((num, num), np.int64)
    np.add.at(counts, (np.asarray(actual), np.asarray(predicted)), 1)
    return counts.tolist()


class Named(TensorDataset):
    classes = ["cat", "dog", "<b>"]


@pytest.mark.parametrize("num", [NUM, 1])
def test_counts_are_those_of_one_process(pools: Pools, num: int) -> None:
    data = Named(torch.arange(num).double(), LABELS[:num])
    part = ConcatDataset([Subset(data, range(num // 2)), Subset(data, range(num // 2, num))])
    for pool in pools.values():
        matrix = gpupool.confusion(Table(SCORES), part, batch_size=8, pool=pool)
        assert matrix.counts.dtype == np.int64
        assert matrix.counts.tolist() == counted(SCORES[:num].argmax(1), LABELS[:num], CLASSES)
        assert matrix.classes == ("cat", "dog", "<b>", "3")


def test_pixels_are_counted_where_they_have_a_class(pools: Pools) -> None:
    maps = torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(2))
    masks = torch.tensor([0, 1, 2, -100]).view(1, 2, 2).repeat(5, 1, 1)
    data, model = TensorDataset(torch.arange(5).double(), masks), Table({"out": maps, "aux": maps})
    matrix, known = gpupool.confusion(model, data, pool=pools[3]), masks != -100
    assert matrix.counts.tolist() == counted(maps.argmax(1)[known], masks[known], 3)
    assert matrix.num_samples == 15


def test_one_output_tells_two_classes_apart(pools: Pools) -> None:
    data = TensorDataset(torch.arange(4).double(), torch.tensor([0, 1, 1, 0]))
    logits = torch.tensor([[-1.0], [2.0], [-3.0], [4.0]])
    matrix = gpupool.confusion(Table(logits), data, classes=["no", "yes"], pool=pools[1])
    assert matrix.counts.tolist() == [[1, 1], [1, 1]]
    with raises(TrainingError, "classes", " 3 ", " 2 "):
        gpupool.confusion(Table(logits), data, classes=["no", "yes", "?"], pool=pools[1])
    with raises(gpupool.SpmdError, "metrics", ename="TrainingError"):
        gpupool.confusion(Table(SCORES), Targets(kind=LABELS), pool=pools[1])


@pytest.fixture
def matrix() -> ConfusionMatrix:
    counts = np.array([[8, 2, 0], [1, 3, 0], [0, 0, 0]])
    return ConfusionMatrix(counts, ("cat", "<b>", "a very long name"))


def test_shares_of_rows_and_columns(matrix: ConfusionMatrix) -> None:
    assert matrix.accuracy == 11 / 14
    assert matrix.recall[:2].tolist() == [0.8, 0.75]
    assert matrix.precision[:2].tolist() == [8 / 9, 0.6]
    assert math.isnan(matrix.recall[2])
    assert matrix.shares[0].tolist() == [0.8, 0.2, 0.0]
    assert matrix.most_confused() == [("cat", "<b>", 2), ("<b>", "cat", 1)]


def test_it_is_a_table_with_colours_in_a_notebook(matrix: ConfusionMatrix) -> None:
    shell = InteractiveShell()
    formatters.register(shell)
    bundle, _ = shell.display_formatter.format(matrix)  # type: ignore[union-attr]
    html = bundle["text/html"]
    assert "<b>" not in html.replace("<b>Confusion matrix</b>", "")
    assert html.count("<tr") == 1 + 3 + 1
    assert ">recall<" in html
    assert ">precision<" in html
    assert "rgba(0,114,189,0.52)" in html  # 80 % of its row
    assert ">80.0 %<" in html
    assert bundle["text/plain"] == repr(matrix)
