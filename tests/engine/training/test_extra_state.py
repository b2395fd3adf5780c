"""Networks whose modules keep more than tensors (`get_extra_state`): it is kept and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gpupool
from gpupool import TrainingError
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on, weights


class Counter(nn.Identity):
    """Counts steps in a dict that it gives away itself.

    Its state has a None, too, and a version, without which it would not take the state back.
    """

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"steps": 0, "name": b"\xff", "sizes": (torch.zeros(1), [None, 1.5])}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        assert state["sizes"] == (torch.zeros(1), [None, 1.5])
        self.seen = state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "nothing"] = None

    def _load_from_state_dict(self, state: Any, prefix: str, about: Any, *rest: Any) -> None:
        assert about["version"] == 3
        assert state.pop(prefix + "nothing") is None
        super()._load_from_state_dict(state, prefix, about, *rest)


def count(info: gpupool.CallbackInfo) -> None:
    if info.event == "step":
        info.model[0].seen["steps"] += 1  # type: ignore[index,operator]


def counting() -> nn.Sequential:
    return nn.Sequential(Counter(), network())


def steps(model: Any) -> int:
    return int(model[0].seen["steps"])


def test_it_goes_on_from_a_checkpoint_as_if_never_interrupted(pools: Pools, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batch_size": 8, "epochs": 2, "callbacks": [count]}
    whole = train_on(pools[2], counting(), samples(40), max_steps=9, **settings)
    settings |= {"checkpoint": str(tmp_path), "resume": "auto"}
    train_on(pools[2], counting(), samples(40), max_steps=3, **settings)
    result = train_on(pools[2], counting(), samples(40), max_steps=9, **settings)
    assert steps(result.model) == steps(whole.model) == 9
    assert torch.equal(weights(result.model), weights(whole.model))
    assert steps(gpupool.load_weights(counting(), str(result.checkpoint))) == 9


class Configured(nn.Identity):
    """Has what no file that is read without running code can hold."""

    def __init__(self, word: Any) -> None:
        super().__init__()
        self.word = word

    def get_extra_state(self) -> Any:
        return self.word


def test_what_cannot_be_kept_is_said_before_training(pools: Pools) -> None:
    for word, named in ((Path(), "Path"), (iter([1]), "")):
        with raises(TrainingError, named):
            train_on(pools[1], nn.Sequential(network(), Configured(word)), samples(24))


class Masked(nn.Module):
    """Makes a buffer when it sees the first batch."""

    mask: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 3)
        self.register_buffer("mask", None)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.full((8,), 0.5)
        return self.inner(inputs * self.mask)  # type: ignore[no-any-return]


def test_a_buffer_that_is_made_while_training_is_kept(pools: Pools, tmp_path: Path) -> None:
    def train(**more: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        settings = {"epochs": 2, "batch_size": 8} | more
        return train_on(pools[2], Masked(), samples(32), **settings).model.state_dict()

    expected = train()
    train(epochs=1, checkpoint=str(tmp_path))
    found = train(checkpoint=str(tmp_path), resume="auto")
    assert found["mask"].tolist() == [0.5] * 8
    assert all(torch.equal(found[name], value) for name, value in expected.items())
