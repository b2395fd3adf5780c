"""Losses: what each is a mean over, so that ranks with any shares give what one process gives."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from gpupool import TrainingError
from gpupool.core.options.named_measures import LOSSES, check_loss
from gpupool.engine.metrics.evaluation import count_correct
from gpupool.engine.metrics.named import mean_of
from gpupool.engine.numerics.losses import add_gradient, make_loss
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
CASES: dict[str, tuple[Any, Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]] = {
    "labels": ("cross_entropy", numbers(NUM, 5), labels(NUM), functional.cross_entropy),
    "maps": (
        "cross_entropy",
        numbers(NUM, 5, 3, 2),
        labels(NUM, 3, 2, ignored=-100),
        functional.cross_entropy,
    ),
    "probabilities": (
        nn.CrossEntropyLoss(label_smoothing=0.1),
        numbers(NUM, 5),
        numbers(NUM, 5, seed=3).softmax(1),
        nn.CrossEntropyLoss(label_smoothing=0.1),
    ),
    "nll": ("nll", numbers(NUM, 5).log_softmax(1), labels(NUM), functional.nll_loss),
    "mse": ("mse", numbers(NUM, 3), numbers(NUM, 3, seed=3), functional.mse_loss),
    "mae": ("mae", numbers(NUM), numbers(NUM, seed=3), functional.l1_loss),
    "huber": ("huber", numbers(NUM, 3), numbers(NUM, 3, seed=3), functional.huber_loss),
    "smooth_l1": ("smooth_l1", numbers(NUM), numbers(NUM, seed=3), functional.smooth_l1_loss),
    "bce_with_logits": (
        "bce_with_logits",
        numbers(NUM, 1),
        labels(NUM) % 2,
        lambda o, t: functional.binary_cross_entropy_with_logits(o[:, 0], t.double()),
    ),
    "a module": (nn.SmoothL1Loss(), numbers(NUM), numbers(NUM, seed=3), nn.SmoothL1Loss()),
    "a function": (lambda o, t: (o - t).abs().mean(), numbers(NUM), labels(NUM), nn.L1Loss()),
}
for smoothing in (0.0, 0.1):
    for ignored in (-100, 3):
        for weight in (None, CLASS_WEIGHTS):
            module = nn.CrossEntropyLoss(weight, ignore_index=ignored, label_smoothing=smoothing)
            name = f"weight {weight is not None}, ignored {ignored}, smoothing {smoothing}"
            holes = ignored if weight is not None or ignored == 3 else None
            CASES[name] = (module, numbers(NUM, 5), labels(NUM, ignored=holes), module)
            maps = labels(NUM, 4, ignored=ignored)
            CASES[f"maps, {name}"] = (module, numbers(NUM, 5, 4), maps, module)


@pytest.mark.parametrize("case", CASES)
def test_the_shares_together_are_the_loss_of_the_whole(case: str) -> None:
    asked, outputs, targets, expected = CASES[case]
    loss = make_loss(asked)
    sums, counts = [], []
    for start, stop in SHARES:
        num_here = stop - start
        counted = loss.num_counted(targets[start:stop] if num_here else targets[:1], num_here)
        counts.append(float(counted))
        if num_here:
            sums.append(float(loss(outputs[start:stop], targets[start:stop])) * float(counted))
    assert sum(sums) / sum(counts) == pytest.approx(float(expected(outputs, targets)), rel=1e-12)


def test_every_name_is_a_loss() -> None:
    assert {name for name in LOSSES if callable(make_loss(name))} == set(LOSSES)


def test_where_nothing_counts_the_loss_is_0_and_so_is_its_gradient() -> None:
    outputs = numbers(2, 5, 3).requires_grad_()
    nowhere = torch.full((2, 3), -100)
    for loss in (make_loss("cross_entropy"), make_loss(nn.CrossEntropyLoss(CLASS_WEIGHTS))):
        value = loss(outputs, nowhere)
        (gradient,) = torch.autograd.grad(value, outputs)
        assert (value.item(), float(gradient.abs().sum())) == (0, 0)


@pytest.mark.parametrize(
    ("targets", "cure"),
    [
        (torch.tensor([[0, 255], [-100, 2]]), ("classes={...}", "ignore_index=255")),
        (torch.tensor([0, 255]), ("replace_head",)),
    ],
)
def test_a_target_without_an_output_says_what_to_do(targets: Tensor, cure: tuple[str, ...]) -> None:
    outputs = numbers(2, 3, *targets.shape[1:])
    with raises(TrainingError, " 255,", " 3 outputs", *cure):
        make_loss("cross_entropy")(outputs, targets)


# ---- several outputs ---------------------------------------------------------------------------


def test_auxiliary_classifiers_count_as_in_the_references() -> None:
    loss, targets = make_loss("cross_entropy"), labels(NUM)
    main, aux = numbers(NUM, 5), numbers(NUM, 5, seed=3)
    first, second = (functional.cross_entropy(o, targets) for o in (main, aux))
    assert torch.isclose(loss({"out": main, "aux": aux}, targets), first + 0.5 * second)
    inception = namedtuple("inception", ["logits", "aux_logits"])
    assert torch.isclose(loss(inception(main, aux), targets), first + 0.4 * second)
    assert torch.isclose(loss(inception(main, None), targets), first)
    googlenet = namedtuple("googlenet", ["logits", "aux_logits2", "aux_logits1"])
    assert torch.isclose(loss(googlenet(main, aux, main), targets), 1.3 * first + 0.3 * second)
    scored, _ = loss.scored(inception(main, aux), targets)
    assert scored is main


def test_a_dict_weighs_the_losses_of_outputs_by_name_or_number() -> None:
    loss = make_loss({"a": "mse", "b": ("mae", 3.0)})
    outputs, targets = {"a": numbers(4), "b": numbers(4, seed=1)}, {"a": labels(4), "b": labels(4)}
    a = functional.mse_loss(outputs["a"], targets["a"].double())
    b = functional.l1_loss(outputs["b"], targets["b"].double())
    assert torch.isclose(loss(outputs, targets), a + 3 * b)
    by_number = make_loss({0: "mse", 1: ("mae", 3.0)})
    pair = (outputs["a"], outputs["b"])
    assert torch.isclose(by_number(pair, (targets["a"], targets["b"])), a + 3 * b)


class TwoHeads(nn.Module):
    """One of 5 classes and a number, from one input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.number = nn.Linear(4, 5).to(DOUBLE), nn.Linear(4, 1).to(DOUBLE)

    def forward(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        x = inputs["x"] + inputs["more"][0]
        return {"kind": self.kind(x), "number": self.number(x)}


class TwoTargets(torch.utils.data.Dataset[Any]):
    """Inputs and targets in dicts."""

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Any:
        inputs = {"x": numbers(NUM, 4)[index], "more": (numbers(NUM, 4, seed=5)[index], "name")}
        return inputs, {"kind": labels(NUM)[index], "number": numbers(NUM, seed=6)[index]}


def both(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    kind = functional.cross_entropy(outputs["kind"], targets["kind"])
    return kind + 0.25 * functional.mse_loss(outputs["number"][:, 0], targets["number"])


def test_losses_of_several_outputs_are_exact_over_ranks(pools: Pools) -> None:
    loss = {"kind": "cross_entropy", "number": ("mse", 0.25)}
    settings = {"loss": loss, "batch_size": 4, "epochs": 2, "lr": 0.1, "shuffle": "never"}
    model, data = TwoHeads(), TwoTargets()
    expected = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for start in [0, 4, 8] * 2:
        rows = [data[i] for i in range(start, min(start + 4, NUM))]
        inputs, targets = torch.utils.data.default_collate(rows)
        optimizer.zero_grad()
        found = both(model(inputs), targets)
        found.backward()
        optimizer.step()
        expected.append(found.item())
    inputs, targets = torch.utils.data.default_collate([data[i] for i in range(NUM)])
    with torch.no_grad():
        outputs = model(inputs)
    for n, pool in pools.items():
        result = train_on(pool, TwoHeads(), data, validation=data, **settings)
        assert result.history.loss == pytest.approx(expected, abs=1e-12), n
        assert (weights(result.model) - weights(model)).abs().max() < 1e-12
        last = result.history.validations[-1]
        assert last.loss == pytest.approx(float(both(outputs, targets)), abs=1e-12)
        right = outputs["kind"].argmax(1) == targets["kind"]
        assert last.accuracy == pytest.approx(float(right.double().mean()), abs=1e-12)


def test_losses_of_a_dict_that_are_means_over_different_things_are_refused() -> None:
    loss = make_loss({"mask": "cross_entropy", "number": "mse"})
    with raises(TrainingError, "'mask'"):
        loss.num_counted({"mask": labels(NUM, 3), "number": numbers(NUM)}, NUM)
    # of the same targets they are means over the same pixels
    auxiliary = make_loss({"out": "cross_entropy", "aux": ("cross_entropy", 0.5)})
    assert (
        int(auxiliary.num_counted(labels(NUM, 3, ignored=-100), NUM))
        == (labels(NUM, 3, ignored=-100) >= 0).sum()
    )


def test_classes_that_weigh_differently_are_exact_over_ranks(pools: Pools) -> None:
    data = TensorDataset(numbers(NUM, 4), labels(NUM, ignored=3))
    settings = {"batch_size": 4, "epochs": 2, "lr": 1.0, "validation": data}
    results = []
    for pool in pools.values():
        torch.manual_seed(0)
        model = nn.Linear(4, 5, dtype=DOUBLE)
        loss = nn.CrossEntropyLoss(CLASS_WEIGHTS, ignore_index=3)
        results.append(train_on(pool, model, data, loss=loss, **settings))
    one = results[0]
    with torch.no_grad():
        whole = loss(one.model(data.tensors[0]), data.tensors[1])
    assert one.history.validations[-1].loss == pytest.approx(float(whole), abs=1e-12)
    for other in results[1:]:
        assert other.history.loss == pytest.approx(one.history.loss, abs=1e-12, nan_ok=True)
        assert (weights(other.model) - weights(one.model)).abs().max() < 1e-12


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "meant"),
    [
        ("crossentropy", " 'cross_entropy'?"),
        (5, "loss=5 "),
        ({}, ""),
        ({"a": "mze"}, " 'mse'?"),
        (nn.MSELoss, " MSELoss()."),
    ],
)
def test_what_is_no_loss_is_refused_with_what_there_is(loss: Any, meant: str) -> None:
    with raises(TrainingError, "loss", meant):
        check_loss(loss)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_module_that_gives_no_mean_is_refused(reduction: str) -> None:
    with raises(TrainingError, "loss"):
        make_loss(nn.MSELoss(reduction=reduction))


def test_a_function_that_gives_no_mean_is_refused() -> None:
    with raises(TrainingError, "loss", " (4,)"):
        make_loss(lambda outputs, targets: outputs - targets)(numbers(4), numbers(4))


def test_a_loss_with_parameters_that_train_is_refused() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    with raises(TrainingError, "loss", "Learned", "scale"):
        make_loss(Learned())


def test_shapes_that_torch_would_compare_each_with_each_are_refused() -> None:
    with raises(TrainingError, " 4 x 2, ", " 4:"):
        make_loss("mse")(numbers(4, 2), numbers(4))


def test_an_output_that_is_not_there_is_named_with_those_that_are() -> None:
    with raises(TrainingError, "b", " 'a'"):
        make_loss({"b": "mse"})({"a": numbers(4)}, numbers(4))


def test_a_loss_may_tell_what_it_is_a_mean_over() -> None:
    class Masked:
        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            counts = targets > 0
            return (outputs * counts).sum() / counts.sum()

        def num_counted(self, targets: Tensor, num_here: int) -> Tensor:
            return (targets > 0).sum(dtype=DOUBLE) * (num_here > 0)

    loss = make_loss(Masked())
    assert float(loss.num_counted(torch.tensor([1, 0, 2]), 3)) == 2
    assert float(loss(torch.tensor([1.0, 5.0, 3.0]), torch.tensor([1, 0, 2]))) == 2


def test_a_class_that_is_ignored_is_neither_right_nor_wrong() -> None:
    loss = make_loss(nn.CrossEntropyLoss(ignore_index=2))
    outputs, targets = torch.eye(3), torch.tensor([0, 0, 2])
    found = count_correct(loss, outputs, targets, 3)
    assert found is not None
    assert [int(number) for number in found] == [1, 2]


# ---- shapes and numbers that do not fit --------------------------------------------------------


def column() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 1)


LINE = TensorDataset(numbers(64, 8).float(), numbers(64, 8).float().sum(1))
LINE_SETTINGS: dict[str, Any] = {"epochs": 1, "batch_size": 16, "shuffle": "never"}


@pytest.mark.parametrize(
    ("module", "name"),
    [(nn.MSELoss(), "mse"), (nn.L1Loss(), "mae"), (nn.HuberLoss(), "huber")],
)
def test_a_module_takes_a_column_of_outputs_as_its_name_does(
    pools: Pools, module: nn.Module, name: str
) -> None:
    named = train_on(pools[1], column(), LINE, loss=name, **LINE_SETTINGS)
    for n in (1, 2):
        found = train_on(pools[n], column(), LINE, loss=module, **LINE_SETTINGS)
        assert (weights(found.model) - weights(named.model)).abs().max() < 1e-6


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_function_that_would_compare_each_with_each_is_told_both_shapes(is_trained: bool) -> None:
    loss = make_loss(lambda outputs, targets: ((outputs.tanh() - targets) ** 2).mean())
    with torch.set_grad_enabled(is_trained), raises(TrainingError, "(4, 1)", "(4,)"):
        loss(numbers(4, 1).requires_grad_(), numbers(4))
    with raises(TrainingError, "(4, 1)", "(4,)"):
        make_loss(functional.mse_loss)(numbers(4), numbers(4, 1))
    inner = make_loss(lambda outputs, targets: (outputs["out"] - targets["y"]).abs().mean())
    with raises(TrainingError, "(4, 1)", "(4,)"):
        inner({"out": numbers(4, 1)}, {"y": numbers(4)})
    with raises(TrainingError, "(4, 1)", "(4,)"):
        mean_of(lambda outputs, targets: (outputs - targets).abs().mean()).update(
            numbers(4, 1), numbers(4)
        )


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
        assert torch.equal(make_loss(loss)(outputs, targets), loss(outputs, targets))


def test_targets_of_python_floats_are_numbers_of_the_outputs(pools: Pools) -> None:
    floats = [(x, float(y)) for x, y in LINE]
    named = train_on(pools[2], column(), floats, loss="huber", **LINE_SETTINGS)
    found = train_on(pools[2], column(), floats, loss=nn.HuberLoss(), **LINE_SETTINGS)
    assert found.history.loss == pytest.approx(named.history.loss, abs=1e-6)


def test_a_function_that_mixes_precisions_is_told_what_to_do() -> None:
    outputs = numbers(4).float().requires_grad_()
    with raises(TrainingError, ".float()"):
        add_gradient(make_loss(lambda out, y: functional.huber_loss(out, y))(outputs, numbers(4)))
