"""N ranks give what one rank gives: same losses, same weights, each sample once."""

from __future__ import annotations

import pytest
import torch

from tests.support.pools import Pools
from tests.support.trainings import network, samples, train_on, weights


@pytest.mark.parametrize(
    ("num_samples", "batch_size"),
    [(64, 16), (50, 16), (33, 16), (7, 16), (10, 2)],
    ids=["even", "uneven last batch", "one left over", "one short batch", "fewer than ranks"],
)
def test_any_number_of_ranks_gives_the_same_loss_curve(
    pools: Pools, num_samples: int, batch_size: int
) -> None:
    curves = {}
    for n, pool in pools.items():
        result = train_on(
            pool, network(), samples(num_samples), batch_size=batch_size, lr=0.1, epochs=3
        )
        curves[n] = result.history.loss
    assert len(curves[1]) == 3 * -(-num_samples // batch_size)
    assert curves[3] == pytest.approx(curves[1], abs=1e-5)


def test_in_float64_losses_and_weights_agree_to_1e_12(pools: Pools) -> None:
    double = torch.float64
    results = {
        n: train_on(pools[n], network(double), samples(50, double), batch_size=12, lr=0.1, epochs=4)
        for n in (1, 2, 3)
    }
    for n in (2, 3):
        assert results[n].history.loss == pytest.approx(results[1].history.loss, abs=1e-12)
        difference = weights(results[n].model) - weights(results[1].model)
        assert difference.abs().max() < 1e-12


def test_every_sample_is_counted_once_an_epoch(pools: Pools) -> None:
    result = train_on(pools[3], network(), samples(50), batch_size=16, epochs=2)
    assert [s.num_samples for s in result.history.steps] == [16, 16, 16, 2] * 2
    assert [s.epoch for s in result.history.steps] == [1] * 4 + [2] * 4
    assert [s.step for s in result.history.steps] == list(range(1, 9))


def test_validation_counts_what_one_process_counts(pools: Pools) -> None:
    held_out = samples(101, seed=1)
    result = train_on(
        pools[2],
        network(),
        samples(64),
        batch_size=16,
        lr=0.5,
        epochs=5,
        validation=held_out,
        keep="last",
    )
    inputs, targets = held_out.tensors
    with torch.no_grad():
        outputs = result.model(inputs)
    last = result.history.validations[-1]
    assert last.accuracy == (outputs.argmax(1) == targets).sum().item() / 101
    expected = torch.nn.functional.cross_entropy(outputs, targets).item()
    assert last.loss == pytest.approx(expected, abs=1e-5)
    assert [v.epoch for v in result.history.validations] == [1, 2, 3, 4, 5]


def test_training_learns(pools: Pools) -> None:
    result = train_on(pools[2], network(), samples(512), batch_size=32, lr=0.1, epochs=10)
    assert result.history.accuracy[-1] > 0.9
    assert result.history.loss[-1] < result.history.loss[0] / 2


@pytest.mark.parametrize("optimizer", ["sgdm", "adam", "adamw", "rmsprop"])
def test_each_optimizer_is_the_one_of_torch(pools: Pools, optimizer: str) -> None:
    result = train_on(
        pools[2],
        network(),
        samples(32),
        optimizer=optimizer,
        lr=0.01,
        weight_decay=0.1,
        batch_size=32,
        epochs=3,
        shuffle="never",
    )
    model, data = network(), samples(32)
    kinds = {
        "sgdm": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, weight_decay=0.1),
        "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
        "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
        "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, weight_decay=0.1),
    }
    reference = kinds[optimizer](model.parameters())
    for _ in range(3):
        reference.zero_grad()
        torch.nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1]).backward()
        reference.step()
    assert (weights(result.model) - weights(model)).abs().max() < 1e-4


def test_shuffle_once_repeats_the_order_and_every_epoch_changes_it(pools: Pools) -> None:
    def losses(shuffle: str) -> list[list[float]]:
        # A learning rate of next to nothing: the loss of a batch depends on its samples alone.
        settings = {"batch_size": 8, "lr": 1e-12, "epochs": 2, "shuffle": shuffle}
        curve = train_on(pools[2], network(), samples(32), **settings).history.loss
        return [curve[:4], curve[4:]]

    first, second = losses("once")
    assert first == pytest.approx(second, abs=1e-6)
    first, second = losses("every-epoch")
    assert first != pytest.approx(second, abs=1e-3)
    assert losses("never")[0] != pytest.approx(first, abs=1e-3)
