"""Metrics against scikit-learn and torchmetrics: on any number of ranks, with uneven shares."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import gpupool
from gpupool import SpmdError, TrainingError
from gpupool.core.options.named_measures import METRICS, check_metrics
from gpupool.engine.group.forming import World
from gpupool.engine.metrics.metrics import make_metrics
from tests.engine.training.vectors import Table, Targets, is_sure
from tests.support.lazily import Lazily
from tests.support.pools import Pools
from tests.support.raising import raises

sk, torchmetrics = Lazily("sklearn.metrics"), Lazily("torchmetrics")
classification = Lazily("torchmetrics.classification")
regression = Lazily("torchmetrics.regression")
NUM, CLASSES = 31, 7
ALONE = World(0, 1, torch.device("cpu"))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


SCORES = drawn(NUM, CLASSES)
LABELS = torch.randint(0, CLASSES - 1, (NUM,), generator=torch.Generator().manual_seed(1))
PREDICTED = SCORES.argmax(1)
LOGITS = drawn(NUM, seed=2).round(decimals=1)  # with ties
BINARY = (drawn(NUM, seed=3) + LOGITS > 0).long()
NUMBERS, WANTED = drawn(NUM, 2, seed=4), drawn(NUM, 2, seed=5) + 1000
MAPS = drawn(NUM, CLASSES, 3, 4, seed=6)
MASKS = torch.randint(0, CLASSES, (NUM, 3, 4), generator=torch.Generator().manual_seed(7)).where(
    drawn(NUM, 3, 4, seed=8) < 0.7, -100
)
KNOWN = MASKS != -100


def macro(name: str) -> float:
    return float(getattr(sk, name)(LABELS, PREDICTED, average="macro", zero_division=0))


def of_pixels(name: str, **settings: Any) -> float:
    return float(getattr(sk, name)(MASKS[KNOWN], MAPS.argmax(1)[KNOWN], **settings))


def of_numbers(name: str) -> float:
    return float(getattr(sk, name)(WANTED.double().numpy(), NUMBERS.double().numpy()))


def chances(num: int) -> Tensor:
    return SCORES[:, :num].double().softmax(1)


def surprise() -> float:
    return math.exp(sk.log_loss(LABELS, chances(CLASSES), labels=range(CLASSES)))


# the name, outputs, targets, what scikit-learn gives
NAMED: list[tuple[str, Tensor, Tensor, Callable[[], float]]] = [
    ("accuracy", SCORES, LABELS, lambda: sk.accuracy_score(LABELS, PREDICTED)),
    ("accuracy", LOGITS, BINARY, lambda: sk.accuracy_score(BINARY, LOGITS > 0)),
    ("accuracy", LOGITS[:, None], BINARY[:, None], lambda: sk.accuracy_score(BINARY, LOGITS > 0)),
    ("top5", SCORES, LABELS, lambda: sk.top_k_accuracy_score(LABELS, SCORES, k=5, labels=range(7))),
    ("precision", SCORES, LABELS, lambda: macro("precision_score")),
    ("recall", SCORES, LABELS, lambda: macro("recall_score")),
    ("f1", SCORES, LABELS, lambda: macro("f1_score")),
    ("mean_iou", SCORES, LABELS, lambda: macro("jaccard_score")),
    ("mean_iou", MAPS, MASKS, lambda: of_pixels("jaccard_score", average="macro")),
    ("pixel_accuracy", MAPS, MASKS, lambda: of_pixels("accuracy_score")),
    ("token_accuracy", MAPS.movedim(1, -1), MASKS, lambda: of_pixels("accuracy_score")),
    ("perplexity", SCORES, LABELS, surprise),
    ("auc", LOGITS[:, None], BINARY, lambda: sk.roc_auc_score(BINARY, LOGITS)),
    ("auc", SCORES[:, :6], LABELS, lambda: sk.roc_auc_score(LABELS, chances(6), multi_class="ovr")),
    ("mse", NUMBERS, WANTED, lambda: of_numbers("mean_squared_error")),
    ("rmse", LOGITS[:, None], BINARY, lambda: sk.root_mean_squared_error(BINARY, LOGITS.double())),
    ("mae", NUMBERS, WANTED, lambda: of_numbers("mean_absolute_error")),
    ("r2", NUMBERS, WANTED, lambda: of_numbers("r2_score")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "outputs", "targets", "expected"), NAMED)
def test_a_named_metric_is_that_of_scikit_learn(
    name: str, outputs: Tensor, targets: Tensor, expected: Callable[[], float]
) -> None:
    for num in (NUM, 7, 3):  # samples in a batch
        metrics = make_metrics(name)
        for part in zip(outputs.split(num), targets.split(num), strict=True):
            metrics.update(*part)
        # torchmetrics computes some in float32 in the end
        assert metrics.compute(ALONE)[name] == pytest.approx(expected(), rel=1e-6)

    assert {name for name, *_ in NAMED} == set(METRICS)


def test_errors_of_maps_of_any_size_are_put_together() -> None:
    metrics = make_metrics(["mse", "mae"])
    for size in (2, 3):
        metrics.update(torch.ones(1, size, size), torch.zeros(1, size, size))
    assert metrics.compute(ALONE) == {"mse": 1, "mae": 1}
    metrics.reset()
    assert np.isnan(list(metrics.compute(ALONE).values())).all()  # without samples


@pytest.mark.parametrize("name", ["accuracy", "top5", "recall", "perplexity"])
def test_an_ignored_class_counts_nowhere(name: str) -> None:
    """Also one that the network can predict, such as 255 of 256."""
    metric, expected = make_metrics(name, ignored=2), make_metrics(name)
    metric.update(SCORES, LABELS)
    others = LABELS != 2
    expected.update(SCORES[others], LABELS[others])
    assert metric.compute(ALONE) == pytest.approx(expected.compute(ALONE))


def numbered(*targets: Tensor) -> Any:
    return TensorDataset(torch.arange(len(targets[0])).double(), *targets)


def of_torchmetrics() -> list[Any]:
    of_classes = [
        classification.MulticlassCohenKappa(CLASSES),
        classification.MulticlassCalibrationError(CLASSES),
    ]
    return [
        *("accuracy", "f1", "auc", "top5", "mean_iou", is_sure),
        classification.MulticlassAccuracy(CLASSES, average="macro"),
        torchmetrics.MetricCollection(of_classes, prefix="all_"),
    ]


@pytest.mark.long
@pytest.mark.parametrize("num", [NUM, 2])
def test_metrics_of_torchmetrics_are_put_together(pools: Pools, num: int) -> None:
    one = make_metrics(of_torchmetrics())
    one.update(SCORES[:num], LABELS[:num])
    expected = one.compute(ALONE)
    assert len(expected) == 9
    data, pool = numbered(LABELS[:num]), pools[3]  # with 2 samples, one of them has none
    values = gpupool.evaluate(Table(SCORES), data, of_torchmetrics(), batch_size=8, pool=pool)
    assert values == pytest.approx(expected, abs=1e-7, nan_ok=True)
    # of one that keeps means and spreads
    alone = regression.PearsonCorrCoef()
    alone.update(LOGITS, BINARY.float())
    data, asked = numbered(BINARY.float()), [regression.PearsonCorrCoef()]
    values = gpupool.evaluate(Table(LOGITS), data, asked, pool=pool)
    assert values["PearsonCorrCoef"] == pytest.approx(float(alone.compute()), abs=1e-5)


def test_outputs_have_metrics_by_name(pools: Pools) -> None:
    model, data = Table({"mask": MAPS, "size": NUMBERS}), Targets(mask=MASKS, size=WANTED)
    asked = {"mask": ["mean_iou", "pixel_accuracy"], "size": "mse"}

    def loss(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(outputs["size"], targets["size"])

    values = gpupool.evaluate(model, data, asked, loss=loss, batch_size=8, pool=pools[3])
    assert values == pytest.approx(
        {
            "loss": nn.functional.mse_loss(NUMBERS, WANTED).item(),
            "mask/mean_iou": of_pixels("jaccard_score", average="macro"),
            "mask/pixel_accuracy": of_pixels("accuracy_score"),
            "size/mse": of_numbers("mean_squared_error"),
        },
        rel=1e-5,
    )


def test_what_is_no_metric_is_refused_with_what_there_is() -> None:
    for asked, meant in (("top-5", " 'top5'?"), (["acuracy"], " 'accuracy'?"), ([Table], "Table(")):
        with raises(TrainingError, "metrics", meant):
            check_metrics(asked)
    with raises(TrainingError, " 9, ", " 7 "):
        make_metrics("f1").update(SCORES[:2], torch.tensor([0, 9]))
    with raises(TrainingError, "outputs (31, 2) ", " targets (31, 2) "):
        make_metrics("f1").update(NUMBERS, WANTED)


class OfEachClass(nn.Module):
    def update(self, outputs: Tensor, targets: Tensor) -> None: ...
    def reset(self) -> None: ...
    def compute(self) -> Tensor:
        return torch.zeros(7)


def test_a_metric_that_fails_is_named_by_every_rank(pools: Pools) -> None:
    with raises(SpmdError, "OfEachClass", "(7,)", ename="TrainingError"):
        gpupool.evaluate(Table(SCORES), numbered(LABELS), [OfEachClass()], pool=pools[3])
