"""What one step is made of gives, on any number of ranks, what one process gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gpupool import TrainingResult
from gpupool.engine.numerics.forward import step_key
from tests.support.pools import Pools
from tests.support.trainings import Centred, network, samples, train_on, weights

DOUBLE = torch.float64
SETTINGS: dict[str, Any] = {"batch_size": 50, "lr": 0.05, "epochs": 2}


def digits(num: int = 303, first: int = 0) -> TensorDataset:
    """Real handwritten digits: images (N, 1, 8, 8) in 0..1, float64, and their classes."""
    images, targets = load_digits(return_X_y=True)
    chosen = slice(first, first + num)
    inputs = torch.from_numpy(images[chosen] / 16).view(-1, 1, 8, 8)
    return TensorDataset(inputs, torch.from_numpy(targets[chosen]))


def convolutions(dropout: float = 0.0) -> nn.Module:
    """A small network with batch norm, float64."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(128, 10),
    ).to(DOUBLE)


def state(result: TrainingResult) -> Tensor:
    """All that a network holds, in one vector."""
    return torch.cat([t.double().flatten() for t in result.model.state_dict().values()])


def apart(one: TrainingResult, other: TrainingResult) -> float:
    """The largest difference of two trainings, of their losses and their networks."""
    losses = torch.tensor(one.history.loss) - torch.tensor(other.history.loss)
    return max(losses.abs().max().item(), (state(one) - state(other)).abs().max().item())


# ---- exact over ranks ---------------------------------------------------------------------------


def test_synchronised_batch_norm_makes_ranks_one(pools: Pools) -> None:
    """303 digits in batches of 50: the last one has 3 samples, on 3 ranks one each."""
    alone = train_on(pools[1], convolutions(), digits(), **SETTINGS)
    for n in (2, 3):
        ours = train_on(pools[n], convolutions(), digits(), batch_norm="sync", **SETTINGS)
        assert apart(ours, alone) < 1e-10
        assert type(ours.model[1]) is nn.BatchNorm2d


def test_local_batch_norm_survives_a_rank_without_samples(pools: Pools) -> None:
    """The last batch has one sample, so that two of three ranks hold a stand-in."""
    result = train_on(pools[3], convolutions(), digits(101), **SETTINGS)
    assert torch.isfinite(state(result)).all()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_local_batch_norm_survives_a_share_of_one_value(pools: Pools, n: int) -> None:
    """Of one sample in the last batch, where torch refuses to train a batch norm."""
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).to(DOUBLE)
    result = train_on(pools[n], model, samples(10 + n, DOUBLE), batch_size=10, epochs=2)
    assert [s.num_samples for s in result.history.steps] == [10, n] * 2
    assert result.model[1].num_batches_tracked == 2  # of the first rank: its whole shares
    assert torch.isfinite(state(result)).all()
    with pytest.raises(Exception, match="more than 1 value per channel"):  # they would never train
        train_on(pools[n], model, samples(12, DOUBLE), batch_size=n, epochs=1)


def test_local_statistics_are_those_of_the_first_rank_that_has_samples(
    pools: Pools,
) -> None:
    """In batches of one sample, which are all of the last rank."""
    settings: dict[str, Any] = {"lr": 0.05, "epochs": 2, "ema": 0.5, "validation": digits(50, 400)}
    alone = train_on(pools[1], convolutions(), digits(20), batch_size=1, **settings)
    other = train_on(pools[3], convolutions(), digits(20), batch_size=1, **settings)
    assert apart(other, alone) < 1e-10
    losses = [[v.loss for v in one.history.validations] for one in (other, alone)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-10)


def test_a_stand_in_leaves_no_trace_in_buffers(pools: Pools) -> None:
    """In a batch of one sample for three ranks."""
    model = nn.Sequential(Centred().double(), network(DOUBLE))
    settings: dict[str, Any] = {"batch_size": 5, "epochs": 2, "shuffle": "never"}
    few = train_on(pools[3], model, samples(1, DOUBLE), **settings)
    one = train_on(pools[1], model, samples(1, DOUBLE), **settings)
    assert few.model[0].batches == 2
    assert apart(few, one) < 1e-12


@pytest.mark.parametrize("kind", ["whole numbers", "large ones"])
def test_what_training_does_not_change_or_is_large_is_no_divergence(
    pools: Pools, kind: str
) -> None:
    model = network()
    if kind == "whole numbers":
        model.quantized = nn.Parameter(torch.arange(4, dtype=torch.uint8), requires_grad=False)
        model.mask = nn.Parameter(torch.full((2,), -torch.inf), requires_grad=False)
    else:
        with torch.no_grad():
            model[2].bias.fill_(1e20)  # type: ignore[operator,union-attr]
    result = train_on(pools[1], model, samples(12), batch_size=6, epochs=1)
    assert (result.stopped_by, result.warnings) == ("epochs", [])


@pytest.mark.parametrize("batch_norm", ["local", "sync"])
def test_a_share_in_parts_is_the_same_step(pools: Pools, batch_norm: str) -> None:
    """Without batch norm; a synchronised one has those of a part, the same on any ranks."""
    model = network(DOUBLE) if batch_norm == "local" else convolutions()
    data = samples(53, DOUBLE) if batch_norm == "local" else digits(53)
    ones = {"accumulate": 4} if batch_norm == "sync" else {}
    whole = train_on(pools[1], model, data, batch_size=10, lr=0.1, epochs=2, **ones)
    for n in (1, 2, 3):
        parts = train_on(
            pools[n],
            model,
            data,
            batch_size=10,
            lr=0.1,
            epochs=2,
            accumulate=4,
            **({"batch_norm": "sync"} if batch_norm == "sync" else {}),
        )
        assert apart(parts, whole) < (1e-12 if batch_norm == "local" else 1e-10)
        assert [s.num_samples for s in parts.history.steps] == [10] * 5 + [3] + [10] * 5 + [3]


def test_the_gradient_of_the_whole_batch_is_clipped(pools: Pools) -> None:
    data = samples(32, DOUBLE)
    settings = {"optimizer": "sgdm", "momentum": 0.0, "lr": 1.0, "clip": 0.02}
    result = train_on(pools[3], network(DOUBLE), data, batch_size=32, epochs=1, **settings)
    model = network(DOUBLE)
    torch.nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1]).backward()
    parameters = list(model.parameters())
    nn.utils.clip_grad_norm_(parameters, 0.02)
    expected = torch.cat([(p.detach() - p.grad).flatten() for p in parameters])
    assert (weights(result.model) - expected).abs().max() < 1e-14


def test_the_average_of_the_weights_is_what_is_kept(pools: Pools) -> None:
    data = samples(32, DOUBLE)
    settings = {"batch_size": 32, "lr": 0.5, "momentum": 0.0, "shuffle": "never"}
    result = train_on(pools[2], network(DOUBLE), data, epochs=4, ema=0.7, **settings)
    average: Tensor | None = None
    for epochs in range(1, 5):
        now = weights(train_on(pools[1], network(DOUBLE), data, epochs=epochs, **settings).model)
        average = now if average is None else 0.7 * average + 0.3 * now
    assert (weights(result.model) - average).abs().max() < 1e-12


def test_whole_numbers_are_not_averaged(pools: Pools) -> None:
    """Such as places in a table: 0.9 * 7 + 0.1 * 7 would be cut off to 6."""
    model, places = network(), torch.arange(500)
    model.register_buffer("places", places)
    result = train_on(pools[2], model, samples(32), batch_size=8, epochs=10, ema=0.9)
    assert torch.equal(result.model.get_buffer("places"), places)


def test_an_unused_parameter_is_no_trouble(pools: Pools) -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.spare = network(DOUBLE), nn.Linear(4, 4).to(DOUBLE)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.inner(inputs)

    torch.manual_seed(0)
    model, data = Spare(), samples(50, DOUBLE)
    alone = train_on(pools[1], model, data, batch_size=12, epochs=2)
    assert apart(train_on(pools[2], model, data, batch_size=12, epochs=2), alone) < 1e-12


# ---- numbers and layouts -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"precision": "bf16"}, 0.05),
        ({"precision": "fp16"}, 0.01),
        ({"channels_last": True}, 1e-5),
    ],
    ids=lambda value: "-".join(map(str, value.items())) if isinstance(value, dict) else "",
)
def test_faster_numbers_are_nearly_the_same(
    pools: Pools, settings: dict[str, Any], tolerance: float
) -> None:
    images, targets = digits(200).tensors
    data = TensorDataset(images.float(), targets)
    model = convolutions().float()
    plain = train_on(pools[2], model, data, **SETTINGS)
    other = train_on(pools[2], model, data, **SETTINGS, **settings)
    assert other.history.loss == pytest.approx(plain.history.loss, abs=tolerance)
    assert other.history.loss != plain.history.loss or "channels_last" in settings
    assert {p.dtype for p in other.model.parameters()} == {torch.float32}


def test_frozen_batch_norms_keep_their_statistics(pools: Pools) -> None:
    model = convolutions()
    model[1].running_mean.fill_(0.25)
    frozen = train_on(pools[2], model, digits(), batch_norm="frozen", **SETTINGS)
    alone = train_on(pools[1], model, digits(), batch_norm="frozen", **SETTINGS)
    assert torch.equal(frozen.model[1].running_mean, model[1].running_mean)
    assert not torch.equal(frozen.model[1].weight, model[1].weight)
    assert apart(frozen, alone) < 1e-12


def test_normalization_is_fitted_to_the_training_data(pools: Pools) -> None:
    inputs, targets = samples(101, DOUBLE).tensors
    raw = TensorDataset(inputs * 7 + 100, targets)
    std, mean = torch.std_mean(raw.tensors[0], 0, correction=0)
    scaled = TensorDataset((raw.tensors[0] - mean) / std, targets)
    settings = {"batch_size": 20, "lr": 0.1, "epochs": 2}
    expected = train_on(pools[1], network(DOUBLE), scaled, **settings, validation=scaled)
    for n in (1, 3):
        found = train_on(
            pools[n], network(DOUBLE), raw, **settings, normalize="fit", validation=raw
        )
        assert apart(found, expected) < 1e-11
        validations = [v.loss for v in found.history.validations]
        assert validations == pytest.approx([v.loss for v in expected.history.validations])


# ---- when it ends, and what is kept --------------------------------------------------------------


def test_random_numbers_depend_on_seed_rank_and_step_alone() -> None:
    keys = {step_key(s, r, n) for s in range(5) for r in range(5) for n in range(200)}
    assert len(keys) == 5 * 5 * 200
    assert len({key & 0xFFFFFFFF for key in keys}) == 5 * 5 * 200
    assert step_key(1, 2, 3) == step_key(1, 2, 3)


def test_dropout_draws_the_same_again(pools: Pools) -> None:
    runs = [train_on(pools[2], convolutions(0.5), digits(), **SETTINGS) for _ in range(2)]
    assert apart(*runs) == 0.0
    other = train_on(pools[2], convolutions(0.5), digits(), **SETTINGS, seed=1)
    assert apart(other, runs[0]) > 0.0


@pytest.mark.parametrize("keep", ["auto", "best", "last"])
def test_the_best_or_the_last_weights_are_kept(pools: Pools, keep: str) -> None:
    """A learning rate that is far too high makes validations go up and down."""
    held_out = samples(64, DOUBLE, seed=1)
    settings = {"batch_size": 8, "lr": 3.0, "epochs": 6, "keep": keep}
    result = train_on(
        pools[2], network(DOUBLE), samples(64, DOUBLE), validation=held_out, **settings
    )
    losses = [v.loss for v in result.history.validations]
    with torch.no_grad():
        outputs = result.model(held_out.tensors[0])
    found = torch.nn.functional.cross_entropy(outputs, held_out.tensors[1]).item()
    assert min(losses) < losses[-1]
    assert found == pytest.approx(losses[-1] if keep == "last" else min(losses), abs=1e-12)
    best = [v.loss for v in result.history.validations if v.is_best]
    assert best[-1] == min(losses)
    assert result.history.end is not None
    kept = next(v.step for v in result.history.validations if v.loss == min(losses))
    assert result.history.end.kept_step == (-1 if keep == "last" else kept)


class Bursting(nn.Module):
    """A network whose outputs are infinite from its 13th step on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return self.inner(inputs) * torch.where(self.steps > 12, torch.inf, 1.0)


@pytest.mark.parametrize("held_out", [None, samples(16, seed=1)], ids=["alone", "validated"])
def test_a_loss_that_is_no_number_ends_training_with_good_weights(
    pools: Pools, held_out: TensorDataset | None
) -> None:
    result = train_on(
        pools[2], Bursting(), samples(40), batch_size=8, epochs=10, validation=held_out
    )
    assert result.stopped_by == "diverged"
    assert len(result.history.steps) == 15  # the sums of an epoch are read at its end
    assert torch.isfinite(weights(result.model)).all()
    assert result.history.end is not None
    assert result.history.end.kept_step in (5, 10)


@pytest.mark.long
def test_a_compiled_network_is_the_same(pools: Pools) -> None:
    settings = {**SETTINGS, "batch_norm": "sync"}  # which is not compiled
    plain = train_on(pools[2], convolutions(), digits(), **settings)
    compiled = train_on(pools[2], convolutions(), digits(), compile=True, **settings)
    assert list(compiled.model.state_dict()) == list(plain.model.state_dict())
    assert apart(compiled, plain) < 1e-9
