"""Networks whose modules keep more than tensors (`get_extra_state`): it is kept and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpupool
from gpupool import TrainingError
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.wire.events import Event, WarningEvent
from gpupool.core.wire.state_dicts import load
from gpupool.engine.group.forming import World
from gpupool.engine.training.checkpoints import Checkpoints
from gpupool.engine.training.loop import fit
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on, weights

ALONE = World(0, 1, torch.device("cpu"))


class Counter(nn.Module):
    """Counts the batches that it is trained on, in a dict that it gives away itself.

    Its state has a None, too, and a version, without which it would not take the state back.
    """

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"steps": 0, "name": b"\xff", "sizes": (torch.zeros(1), [None, 1.5])}

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs

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


class Configured(nn.Identity):
    """Has, from a batch on, what no file that is read without running code can hold."""

    def __init__(self, word: Any, from_batch: int = 0) -> None:
        super().__init__()
        self.word, self.batches_left = word, from_batch

    def forward(self, inputs: Tensor) -> Tensor:
        self.batches_left -= 1
        return inputs

    def get_extra_state(self) -> Any:
        return self.word if self.batches_left <= 0 else None

    def set_extra_state(self, state: Any) -> None:
        assert state is None


def counting() -> nn.Sequential:
    return nn.Sequential(Counter(), network())


def steps(model: Any) -> int:
    return int(model[0].seen["steps"])


def test_what_is_kept_is_of_the_step_that_is_kept(pools: Pools) -> None:
    # too fast, so that the first validation is the best
    model = counting()
    result = train_on(
        pools[2], model, samples(24), validation=samples(9), batch_size=8, lr=300, epochs=3,
        optimizer="sgdm", objective="loss", keep="best", callbacks=[count],
    )  # fmt: skip
    assert steps(result.model) == result.kept_step < 9
    assert steps(model) == 0


def test_it_goes_on_from_a_checkpoint_as_if_never_interrupted(pools: Pools, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batch_size": 8, "epochs": 2, "callbacks": [count]}
    whole = train_on(pools[2], counting(), samples(40), max_steps=9, **settings)
    settings |= {"checkpoint": str(tmp_path), "resume": "auto"}
    train_on(pools[2], counting(), samples(40), max_steps=3, **settings)
    result = train_on(pools[2], counting(), samples(40), max_steps=9, **settings)
    assert steps(result.model) == steps(whole.model) == 9
    assert torch.equal(weights(result.model), weights(whole.model))
    assert steps(gpupool.load_weights(counting(), str(result.checkpoint))) == 9


def test_what_cannot_be_kept_is_said_before_training(pools: Pools) -> None:
    for word, named in ((Path(), "Path"), (iter([1]), "")):
        with raises(TrainingError, named):
            train_on(pools[1], nn.Sequential(network(), Configured(word)), samples(24))


def test_what_a_checkpoint_cannot_hold_any_more_is_a_warning_that_names_it(tmp_path: Path) -> None:
    told: list[Event] = []
    options = TrainingOptions(batch_size=8, epochs=1, checkpoint=str(tmp_path), checkpoint_every=1)
    model = nn.Sequential(network(), Configured(Path(), from_batch=2))
    found = fit(model, samples(40), "cross_entropy", options, world=ALONE, emit=told.extend)
    assert found.step == 5
    warned = [event.message for event in told if isinstance(event, WarningEvent)]
    assert len(warned) == 4
    assert "Path" in warned[0]
    assert Checkpoints(str(tmp_path)).names() == ["step-00000001.pt"]


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
    assert expected["mask"].tolist() == [0.5] * 8
    train(epochs=1, checkpoint=str(tmp_path))
    for name, value in train(checkpoint=str(tmp_path), resume="auto").items():
        assert torch.equal(value, expected[name]), name
    with pytest.raises(RuntimeError, match="Unexpected key"):
        load(nn.Sequential(nn.Linear(8, 3)), expected)
