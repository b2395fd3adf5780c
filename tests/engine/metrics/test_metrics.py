"""Metrics against scikit-learn and torchmetrics: on 1, 2 and 3 ranks, with uneven shares."""

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
from tests.engine.metrics.tables import Table, Targets, is_sure
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


def macro(function: Any) -> float:
    return float(function(LABELS, PREDICTED, average="macro", zero_division=0))


# what -> the name, outputs, targets, what scikit-learn gives
IN_FLOAT32 = ("auc",)

NAMED: dict[str, tuple[str, Tensor, Tensor, Callable[[], float]]] = {
    "accuracy": ("accuracy", SCORES, LABELS, lambda: sk.accuracy_score(LABELS, PREDICTED)),
    "accuracy of two": ("accuracy", LOGITS, BINARY, lambda: sk.accuracy_score(BINARY, LOGITS > 0)),
    "top5": (
        "top5",
        SCORES,
        LABELS,
        lambda: sk.top_k_accuracy_score(LABELS, SCORES, k=5, labels=range(7)),
    ),
    "precision": ("precision", SCORES, LABELS, lambda: macro(sk.precision_score)),
    "recall": ("recall", SCORES, LABELS, lambda: macro(sk.recall_score)),
    "f1": ("f1", SCORES, LABELS, lambda: macro(sk.f1_score)),
    "mean_iou": ("mean_iou", SCORES, LABELS, lambda: macro(sk.jaccard_score)),
    "mean_iou of maps": (
        "mean_iou",
        MAPS,
        MASKS,
        lambda: sk.jaccard_score(MASKS[KNOWN], MAPS.argmax(1)[KNOWN], average="macro"),
    ),
    "pixel_accuracy": (
        "pixel_accuracy",
        MAPS,
        MASKS,
        lambda: sk.accuracy_score(MASKS[KNOWN], MAPS.argmax(1)[KNOWN]),
    ),
    "token_accuracy": (
        "token_accuracy",
        MAPS.movedim(1, -1),
        MASKS,
        lambda: sk.accuracy_score(MASKS[KNOWN], MAPS.argmax(1)[KNOWN]),
    ),
    "perplexity": (
        "perplexity",
        SCORES,
        LABELS,
        lambda: math.exp(sk.log_loss(LABELS, SCORES.double().softmax(1), labels=range(7))),
    ),
    "auc": ("auc", LOGITS[:, None], BINARY, lambda: sk.roc_auc_score(BINARY, LOGITS)),
    "auc of more": (
        "auc",
        SCORES[:, :6],
        LABELS,
        lambda: sk.roc_auc_score(LABELS, SCORES[:, :6].double().softmax(1), multi_class="ovr"),
    ),
    "mse": (
        "mse",
        NUMBERS,
        WANTED,
        lambda: sk.mean_squared_error(WANTED.double(), NUMBERS.double()),
    ),
    "rmse": (
        "rmse",
        LOGITS[:, None],
        BINARY,
        lambda: sk.root_mean_squared_error(BINARY, LOGITS.double()),
    ),
    "mae": (
        "mae",
        NUMBERS,
        WANTED,
        lambda: sk.mean_absolute_error(WANTED.double(), NUMBERS.double()),
    ),
    "r2": (
        "r2",
        NUMBERS,
        WANTED,
        lambda: sk.r2_score(WANTED.double().numpy(), NUMBERS.double().numpy()),
    ),
}


def measured(asked: Any, outputs: Any, targets: Any, parts: int = 4) -> dict[str, float]:
    """The values, of samples that came in batches."""
    metrics = make_metrics(asked)
    for start in range(0, NUM, NUM // parts):
        here = slice(start, start + NUM // parts)
        metrics.update(outputs[here], targets[here])
    return metrics.compute(ALONE)


@pytest.mark.parametrize("what", NAMED)
def test_a_named_metric_is_that_of_scikit_learn(what: str) -> None:
    name, outputs, targets, expected = NAMED[what]
    for parts in (1, 4, 10):
        found = measured(name, outputs, targets, parts)[name]
        # torchmetrics computes these in float32 in the end
        assert found == pytest.approx(expected(), rel=1e-6 if name in IN_FLOAT32 else 1e-9)


@pytest.mark.parametrize("name", ["accuracy", "pixel_accuracy", "top5", "recall"])
def test_an_ignored_class_counts_nowhere(name: str) -> None:
    """Also one that the network can predict, such as 255 of 256."""
    metric, expected = make_metrics(name, ignored=2), make_metrics(name)
    metric.update(SCORES, LABELS)
    others = LABELS != 2
    expected.update(SCORES[others], LABELS[others])
    assert metric.compute(ALONE) == expected.compute(ALONE)


def test_every_name_is_compared_with_scikit_learn() -> None:
    assert {name for name, *_ in NAMED.values()} == set(METRICS)


def numbered(*targets: Tensor) -> Any:
    return TensorDataset(torch.arange(len(targets[0])).double(), *targets)


def of_torchmetrics() -> list[Any]:
    return [
        "accuracy",
        "f1",
        "auc",
        is_sure,
        classification.MulticlassAccuracy(CLASSES, average="macro"),
        torchmetrics.MetricCollection(
            [
                classification.MulticlassCohenKappa(CLASSES),
                classification.MulticlassCalibrationError(CLASSES),
            ],
            prefix="all_",
        ),
    ]


@pytest.mark.long
@pytest.mark.parametrize("num", [NUM, 2])
def test_metrics_of_torchmetrics_are_put_together(pools: Pools, num: int) -> None:
    one = make_metrics(of_torchmetrics())
    one.update(SCORES[:num], LABELS[:num])
    expected = one.compute(ALONE)
    assert len(expected) == 7
    data, pool = numbered(LABELS[:num]), pools[3]  # with 2 samples, one of them has none
    values = gpupool.evaluate(Table(SCORES), data, of_torchmetrics(), batch_size=8, pool=pool)
    assert values == pytest.approx(expected, abs=1e-7, nan_ok=True)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_named_metrics_are_the_same_on_any_number_of_ranks(pools: Pools, size: int) -> None:
    asked = ["accuracy", "top5", "precision", "recall", "f1", "mean_iou"]
    settings = {"loss": "cross_entropy", "batch_size": 4, "pool": pools[size]}
    values = gpupool.evaluate(Table(SCORES), numbered(LABELS), asked, **settings)
    assert values["accuracy"] == int((PREDICTED == LABELS).sum()) / NUM
    expected = {name: NAMED[name][3]() for name in asked}
    assert {name: values[name] for name in asked} == pytest.approx(expected, rel=1e-7)
    expected = nn.functional.cross_entropy(SCORES.double(), LABELS).item()
    assert values["loss"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.long
def test_outputs_have_metrics_by_name(pools: Pools) -> None:
    model = Table({"mask": MAPS, "size": NUMBERS})
    data = Targets(mask=MASKS, size=WANTED)
    asked = {"mask": ["mean_iou", "pixel_accuracy"], "size": regression.MeanSquaredError()}
    loss = {"mask": "cross_entropy"}
    values = gpupool.evaluate(model, data, asked, loss=loss, batch_size=8, pool=pools[3])
    mse = float((NUMBERS - WANTED).double().square().mean())
    assert values == pytest.approx(
        {
            "loss": nn.functional.cross_entropy(MAPS, MASKS).item(),
            "mask/mean_iou": NAMED["mean_iou of maps"][3](),
            "mask/pixel_accuracy": NAMED["pixel_accuracy"][3](),
            "size/MeanSquaredError": mse,
        },
        rel=1e-5,
    )


@pytest.mark.long
def test_a_metric_that_keeps_means_and_spreads_is_put_together_as_torchmetrics_does(
    pools: Pools,
) -> None:
    alone = regression.PearsonCorrCoef()
    alone.update(LOGITS, BINARY.float())
    values = gpupool.evaluate(
        Table(LOGITS), numbered(BINARY.float()), [regression.PearsonCorrCoef()], pool=pools[3]
    )
    assert values["PearsonCorrCoef"] == pytest.approx(float(alone.compute()), abs=1e-5)


def test_private_names_of_torchmetrics_that_are_relied_on() -> None:
    """`_reductions` names the states and how ranks put them together; a collection's parts too."""
    metric = classification.MulticlassAccuracy(3)
    assert list(metric._reductions) == ["tp", "fp", "tn", "fn"]
    parts = torchmetrics.MetricCollection([metric, classification.MulticlassF1Score(3)]).modules()
    assert len([part for part in parts if hasattr(part, "_reductions")]) == 2
    assert callable(metric.distributed_available_fn)


def test_without_samples_a_value_is_nan() -> None:
    values = make_metrics(["accuracy", "f1"]).compute(ALONE)
    assert np.isnan(list(values.values())).all()
    assert make_metrics(()).compute(ALONE) == {}


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("top-5", " 'top5'?"),
        (["accuracy", "acuracy"], " 'accuracy'?"),
    ],
)
def test_what_is_no_metric_is_refused_with_what_there_is(asked: Any, meant: str) -> None:
    with raises(TrainingError, "metrics", meant):
        check_metrics(asked)


def test_a_class_is_refused_with_how_a_metric_is_made_of_it() -> None:
    with raises(TrainingError, "metrics", " MulticlassAccuracy(...)."):
        check_metrics([classification.MulticlassAccuracy])


def test_a_class_that_the_network_does_not_know_is_named() -> None:
    with raises(TrainingError, " 9, ", " 7 "):
        make_metrics("f1").update(SCORES[:2], torch.tensor([0, 9]))
    with raises(TrainingError, "outputs (31, 2) ", " targets (31, 2) "):
        make_metrics("f1").update(NUMBERS, WANTED)


def test_a_metric_that_fails_is_named_by_every_rank(pools: Pools) -> None:
    by_class = classification.MulticlassAccuracy(CLASSES, average=None)
    with raises(SpmdError, "MulticlassAccuracy", "(7,)"):
        gpupool.evaluate(Table(SCORES), numbered(LABELS), [by_class], pool=pools[3])
