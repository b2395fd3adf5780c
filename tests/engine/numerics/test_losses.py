"""Losses: what each is a mean over, so that ranks with any shares give what one process gives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from gpupool import TrainingError
from gpupool.core.options.named_measures import LOSSES
from gpupool.engine.metrics.metrics import make_metrics
from gpupool.engine.numerics.losses import make_loss
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import train_on, weights

DOUBLE = torch.float64
NUM = 11
SHARES = [(0, 4), (4, 4), (4, 10), (10, 11)]  # of 4 ranks, one of them with nothing


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def labels(*shape: int, ignored: int | None = None) -> Tensor:
    drawn = torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(1))
    return drawn if ignored is None else drawn.where(numbers(*shape, seed=2) < 0.5, ignored)


CLASS_WEIGHTS = torch.tensor([0.1, 0.02, 0.3, 0.0, 0.05], dtype=DOUBLE)
SMOOTH = nn.CrossEntropyLoss(label_smoothing=0.1)
MAPS = (numbers(NUM, 5, 3, 2), labels(NUM, 3, 2, ignored=-100))
# what is asked for, outputs, targets; and what it is on the whole, where not the same
CASES: list[tuple[Any, ...]] = [
    ("cross_entropy", numbers(NUM, 5), labels(NUM), functional.cross_entropy),
    ("cross_entropy", *MAPS, functional.cross_entropy),
    (SMOOTH, numbers(NUM, 5), numbers(NUM, 5, seed=3).softmax(1), SMOOTH),
    ("nll", numbers(NUM, 5).log_softmax(1), labels(NUM), functional.nll_loss),
    (
        "bce_with_logits",
        numbers(NUM, 1),
        labels(NUM) % 2,
        lambda o, t: functional.binary_cross_entropy_with_logits(o[:, 0], t.double()),
    ),
    (lambda o, t: (o - t).abs().mean(), numbers(NUM), labels(NUM), nn.L1Loss()),
    ("huber", numbers(NUM, 1), numbers(NUM, seed=3), lambda o, t: nn.HuberLoss()(o[:, 0], t)),
]
for kind in ("mse", "mae", "huber", "smooth_l1"):
    module = getattr(nn, LOSSES[kind])()
    CASES += [(one, numbers(NUM), numbers(NUM, seed=3), module) for one in (kind, module)]
for ignored in (-100, 3):
    for weight in (None, CLASS_WEIGHTS):
        module = nn.CrossEntropyLoss(weight, ignore_index=ignored, label_smoothing=0.1)
        holes = ignored if weight is not None or ignored == 3 else None
        CASES.append((module, numbers(NUM, 5), labels(NUM, ignored=holes), module))
        CASES.append((module, numbers(NUM, 5, 4), labels(NUM, 4, ignored=ignored), module))


@pytest.mark.parametrize(("asked", "outputs", "targets", "expected"), CASES)
def test_the_shares_together_are_the_loss_of_the_whole(
    asked: Any, outputs: Tensor, targets: Tensor, expected: Any
) -> None:
    loss = make_loss(asked)
    sums, counts = [], []
    for start, stop in SHARES:
        num_here = stop - start
        counted = loss.num_counted(targets[start:stop] if num_here else targets[:1], num_here)
        counts.append(float(counted))
        if num_here:
            sums.append(float(loss.mean(outputs[start:stop], targets[start:stop])) * float(counted))
    assert sum(sums) / sum(counts) == pytest.approx(float(expected(outputs, targets)), rel=1e-12)
    assert {case[0] for case in CASES if isinstance(case[0], str)} == set(LOSSES)


def test_where_nothing_counts_the_loss_is_0_and_so_is_its_gradient() -> None:
    outputs = numbers(2, 5, 3).requires_grad_()
    for loss in (make_loss("cross_entropy"), make_loss(nn.CrossEntropyLoss(CLASS_WEIGHTS))):
        value = loss.mean(outputs, torch.full((2, 3), -100))
        (gradient,) = torch.autograd.grad(value, outputs)
        assert (value.item(), float(gradient.abs().sum())) == (0, 0)


@pytest.mark.parametrize("inner", [(), (3,)], ids=["samples", "pixels"])
def test_classes_that_weigh_differently_or_nothing_are_exact_over_ranks(
    pools: Pools, inner: tuple[int, ...]
) -> None:
    """Of a batch in which nothing has a class the loss is NaN, and the weights are as they were."""
    targets = labels(NUM, *inner, ignored=3)
    targets[4:8] = 3  # the second batch
    data = TensorDataset(numbers(NUM, *inner, 4), targets)
    settings = {"batch_size": 4, "epochs": 2, "lr": 1.0, "validation": data, "shuffle": "never"}
    loss, results = nn.CrossEntropyLoss(CLASS_WEIGHTS, ignore_index=3), []
    for pool in pools.values():
        torch.manual_seed(0)
        model = nn.Linear(4, 5, dtype=DOUBLE)
        results.append(train_on(pool, model, data, loss=loss, **settings))
    one, *others = results
    outputs = one.model(data.tensors[0]).movedim(-1, 1)
    validated, is_right = one.history.validations[-1], outputs.argmax(1) == targets
    assert validated.loss == pytest.approx(loss(outputs, targets).item(), abs=1e-12)
    assert validated.accuracy == is_right[targets != 3].double().mean().item()
    assert [math.isnan(value) for value in one.history.loss] == [False, True, False] * 2
    for other in others:
        assert other.history.loss == pytest.approx(one.history.loss, abs=1e-12, nan_ok=True)
        assert (weights(other.model) - weights(one.model)).abs().max() < 1e-12


# ---- what is refused ---------------------------------------------------------------------------


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


PIXELS = torch.tensor([[0, 255], [-100, 2]])
FOUR = numbers(4, 1).requires_grad_()


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "names"),
    [
        ("crossentropy", None, None, (" 'cross_entropy'?",)),
        (5, None, None, ("loss=5 ",)),
        ({"a": "mse"}, None, None, ("loss=",)),
        (nn.MSELoss, None, None, (" MSELoss(",)),
        (nn.MSELoss(reduction="sum"), None, None, ("reduction='sum'",)),
        (Learned(), None, None, ("Learned", "scale")),
        (lambda o, t: o - t, numbers(4), numbers(4), ("loss", " (4,)")),
        ("mse", numbers(4, 2), numbers(4), (" 4 x 2, ", " 4:")),
        ("mse", {"a": numbers(4)}, numbers(4), (" dict",)),
        ("cross_entropy", (numbers(4, 3), numbers(4, 3)), labels(4), (" tuple",)),
        ("output", numbers(4, 3), labels(4), (" Tensor",)),
        ("cross_entropy", numbers(2, 3, 2), PIXELS, (" 255 ", " 3 outputs", "ignore_index=")),
        # each with each
        (lambda o, t: ((o.tanh() - t) ** 2).mean(), FOUR, numbers(4), ("(4, 1)", "(4,)")),
        (functional.mse_loss, numbers(4), numbers(4, 1), ("(4, 1)", "(4,)")),
        (lambda o, t: (o["y"] - t).mean(), {"y": FOUR}, numbers(4), ("(4, 1)", "(4,)")),
    ],
)
def test_what_is_no_loss_is_refused(loss: Any, outputs: Any, targets: Any, names: Any) -> None:
    with raises(TrainingError, *names):
        make_loss(loss).mean(outputs, targets)


def test_a_function_that_fits_the_shapes_itself_is_left_alone() -> None:
    def squeezed(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs.squeeze(1), targets)

    def of_pairs(outputs: Tensor, targets: Tensor) -> Tensor:
        is_later = targets[:, None] > targets
        return (outputs.T - outputs).where(is_later, 0).mean()

    def viewed(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs, targets.view_as(outputs).type_as(outputs))

    for loss in (squeezed, of_pairs, viewed):
        outputs, targets = numbers(4, 1), numbers(4, seed=1)
        assert torch.equal(make_loss(loss).mean(outputs, targets), loss(outputs, targets))
    with raises(TrainingError, "(4, 1)", "(4,)"):  # also a metric's
        metrics = make_metrics([lambda o, t: (o - t).abs().mean()])
        metrics.update(numbers(4, 1), numbers(4))


def test_what_counts_nothing_is_refused() -> None:
    for loss in ("mse", lambda outputs, targets: outputs.mean()):
        with raises(TrainingError, "weight='tokens'"):
            make_loss(loss, weight="tokens").num_counted({"ids": numbers(4)}, 4)
