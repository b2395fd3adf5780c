"""A step of the user's: exact on any number of ranks, stopped, saved and resumed as any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from gpupool import OptionsError, SpmdError, TrainingError, TrainingOptions, TrainingRun
from gpupool.training.head import as_module
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on, weights

DOUBLE = torch.float64
SETTINGS: dict[str, Any] = {"batch_size": 8, "epochs": 3, "lr": 0.1, "shuffle": "never"}


def plain_step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> Tensor:
    inputs, targets = batch
    loss = functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def both(pools: Pools, model: Any, data: Any, **settings: Any) -> list[Any]:
    """The results on one rank and on three, which are equal in float64 to 1e-12."""
    results = []
    for pool in pools.values():
        options = TrainingOptions(**SETTINGS | settings)
        results.append(TrainingRun(pool, model(), data, "auto", options, None).result())
    one, three = results
    assert three.history.loss == pytest.approx(one.history.loss, abs=1e-12)
    assert (weights(three.model) - weights(one.model)).abs().max() < 1e-12
    return results


@pytest.mark.parametrize("num_samples", [33, 2], ids=["uneven", "fewer than ranks"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_it_is_the_step_of_train(pools: Pools, num_samples: int, clip: float | None) -> None:
    data = samples(num_samples, DOUBLE)
    _, own = both(pools, lambda: network(DOUBLE), data, step=plain_step, clip=clip)
    expected = train_on(pools[1], network(DOUBLE), data, clip=clip, **SETTINGS)
    assert own.history.loss == pytest.approx(expected.history.loss, abs=1e-12)
    assert (weights(own.model) - weights(expected.model)).abs().max() < 1e-12


class Game(nn.Module):
    """Makes points, or judges them."""

    def __init__(self, num_in: int, num_out: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Linear(num_in, 8, dtype=DOUBLE), nn.Tanh(), nn.Linear(8, num_out, dtype=DOUBLE)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def players() -> dict[str, nn.Module]:
    return {"maker": Game(2, 3, 1), "judge": Game(3, 1, 2)}


def play(nets: dict[str, Any], batch: Any, optimizers: dict[str, Any]) -> dict[str, Tensor]:
    """Of a GAN: the judge learns, then the maker; the judge's gradients of that are not used."""
    noise, real = batch
    made = nets["maker"](noise)
    judged = functional.softplus(-nets["judge"](real)).mean()
    judged = judged + functional.softplus(nets["judge"](made.detach())).mean()
    optimizers["judge"].zero_grad()
    judged.backward()
    optimizers["judge"].step()
    found = functional.softplus(-nets["judge"](made)).mean()
    optimizers["maker"].zero_grad()
    found.backward()
    optimizers["maker"].step()
    return {"judge": judged, "maker": found}


def pairs_of_points(num: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    points = torch.randn(num, 5, dtype=DOUBLE, generator=generator)
    return [(point[:2], point[2:]) for point in points]


@pytest.mark.parametrize("optimizer", ["sgdm", "adam"])
def test_two_networks_play_against_each_other(pools: Pools, optimizer: str) -> None:
    data = pairs_of_points(21)
    _, found = both(pools, players, data, step=play, optimizer=optimizer, lr=0.01)
    nets = players()
    kinds: dict[str, Any] = {
        "sgdm": lambda net: torch.optim.SGD(net.parameters(), 0.01, momentum=0.9),
        "adam": lambda net: torch.optim.Adam(net.parameters(), 0.01),
    }
    optimizers = {name: kinds[optimizer](net) for name, net in nets.items()}
    losses = []
    for _ in range(3):
        for start in range(0, 21, 8):
            part = data[start : start + 8]
            batch = torch.stack([a for a, _ in part]), torch.stack([b for _, b in part])
            losses.append(sum(play(nets, batch, optimizers).values()).item())
    assert found.history.loss == pytest.approx(losses, abs=1e-12)
    assert isinstance(found.model, nn.ModuleDict)
    assert (weights(found.model) - weights(nn.ModuleDict(nets))).abs().max() < 1e-12


class Boxes(Dataset[Any]):
    """Pictures of several sizes, each with some boxes."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(index)
        size = 4 + index % 3
        picture = torch.rand(3, size, size, dtype=DOUBLE, generator=generator)
        boxes = torch.rand(1 + index % 2, 4, dtype=DOUBLE, generator=generator)
        return picture, {"boxes": boxes}


class Detector(nn.Module):
    """As those of torchvision: lists in, losses by name out while it trains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(3, 4, dtype=DOUBLE)

    def forward(self, pictures: Any, targets: Any = None) -> Any:
        found = [self.head(picture.mean((1, 2))) for picture in pictures]
        pairs = zip(found, targets, strict=True)
        losses = [(boxes["boxes"] - box).square().mean() for box, boxes in pairs]
        return {"box": torch.stack(losses).mean(), "size": torch.stack(found).square().mean()}


def as_lists(rows: list[Any]) -> Any:
    return tuple(zip(*rows, strict=True))


def detect(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    pictures, targets = batch
    losses: dict[str, Tensor] = model(pictures, targets)
    optimizer.zero_grad()
    torch.stack(list(losses.values())).sum().backward()
    optimizer.step()
    return losses


def test_lists_of_targets_of_any_length(pools: Pools) -> None:
    _, own = both(pools, Detector, Boxes(), step=detect, collate=as_lists)
    assert own.history.loss[-1] < own.history.loss[0]


class Rare(nn.Module):
    """Uses a part of itself only for some samples, and another one never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.main, self.rare = (nn.Linear(8, 3, dtype=DOUBLE) for _ in range(2))
        self.never = nn.Parameter(torch.ones(1, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        is_rare = x[:, 0] > 1.0
        found = self.main(x)
        return found + self.rare(x) * is_rare[:, None] if is_rare.any() else found


def test_what_has_no_gradient_on_a_rank_or_on_all(pools: Pools) -> None:
    """Weight decay would change what is never used, if it got a gradient of zeros."""
    data = samples(33, DOUBLE)
    one, _ = both(pools, Rare, data, step=plain_step, weight_decay=0.1)
    assert one.model.never.item() == 1.0


def test_it_is_stopped_saved_and_resumed(pools: Pools, tmp_path: Path) -> None:
    data, settings = pairs_of_points(21), {"step": play, "optimizer": "adam", **SETTINGS}
    whole = train_on(pools[2], as_module(players()), data, **settings)
    kept = {"checkpoint": str(tmp_path), "checkpoint_every": 2, **settings}
    ended = train_on(
        pools[2], as_module(players()), data, callbacks=[lambda info: info.step == 4], **kept
    )
    assert ended.stopped_by == "callback"
    resumed = train_on(pools[2], as_module(players()), data, resume="auto", **kept)
    assert resumed.history.loss[-3:] == whole.history.loss[-3:]
    assert torch.equal(weights(resumed.model), weights(whole.model))


# ---- what it cannot be -------------------------------------------------------------------------


def test_what_does_not_go_with_it_is_refused(pools: Pools) -> None:
    with raises(OptionsError, "type", "step"):
        TrainingOptions(step="adam")  # type: ignore[arg-type]
    with raises(OptionsError, "no effect", "accumulate", "step"):
        TrainingOptions(step=plain_step, accumulate=2)
    with raises(OptionsError, "conflict", "precision", "step"):
        TrainingOptions(step=plain_step, precision="fp16")
    with raises(OptionsError, "conflict", "gather", "accumulate"):
        TrainingOptions(gather=True, accumulate=2)
    with raises(TrainingError, "several networks", "model"):
        TrainingRun(pools[1], players(), samples(9), "auto", TrainingOptions(), None)  # type: ignore[arg-type]
    with raises(TrainingError, "no loss", "validation"):
        options = TrainingOptions(step=plain_step)
        TrainingRun(pools[1], network(), samples(9), "auto", options, samples(9))


def test_what_it_returns_is_the_loss(pools: Pools) -> None:
    with raises(SpmdError, "no number", "step", ename="TrainingError"):
        train_on(pools[2], network(), samples(9), step=lambda model, batch, optimizer: None)
