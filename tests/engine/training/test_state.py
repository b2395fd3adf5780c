"""Whatever a training holds is in its checkpoint: every optimizer, scaled losses, what was told."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpupool
from gpupool import TrainingError
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.wire.events import CheckpointEvent, DataEvent, Event, StepEvent
from gpupool.engine.group.forming import World
from gpupool.engine.training.callbacks import CallbackInfo
from gpupool.engine.training.checkpoints import Checkpoints
from gpupool.engine.training.loop import fit
from tests.engine.training.test_option_effects import trained
from tests.engine.training.vectors import Vectors
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on, weights


def fitted(
    model: nn.Module, dataset: Any = None, **settings: Any
) -> tuple[dict[str, bytes], list[Event]]:
    """The bytes of the weights after training here, without a pool, and what was told."""
    data, usual = samples(30) if dataset is None else dataset, {"batch_size": 8, "epochs": 2}
    seen = trained(model, data, **{**usual, "lr": 1e-3, **settings})
    state = seen.result.model.state_dict()
    return {name: tensor.numpy().tobytes() for name, tensor in state.items()}, seen.events


def flat() -> nn.Module:
    return nn.Sequential(nn.Flatten(), *network())


def losses(events: Sequence[Event]) -> list[float]:
    return [event.loss for event in events if isinstance(event, StepEvent)]


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "sgdm", "momentum": 0.9},
        {"optimizer": "adam"},
        {"optimizer": "adamw", "weight_decay": 0.1},
        {"optimizer": "rmsprop", "momentum": 0.5},
        {"optimizer": torch.optim.NAdam},
        {"precision": "fp16"},
        {"precision": "bf16", "ema": 0.9},
        {"normalize": "fit"},
        {"learn_rate_factors": {"3.*": 10, "1.bias": 0}, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_it_goes_on_to_the_last_bit(tmp_path: Path, settings: dict[str, Any]) -> None:
    inputs, targets = samples(30).tensors
    data = torch.utils.data.TensorDataset(inputs.view(30, 8, 1, 1).abs(), targets)
    saved = {"checkpoint": str(tmp_path), "checkpoint_every": 1, "num_checkpoints": 8}
    expected, told = fitted(flat(), data, **settings, **saved)
    weights, again = fitted(flat(), data, **settings, resume=f"{tmp_path}/step-00000003.pt")
    assert weights == expected
    assert losses(again) == losses(told)


def test_skipped_samples_are_told_again_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpupool.core.options.training_options.MAX_SKIPPED", 0.2)
    settings: dict[str, Any] = {"on_error": "skip", "shuffle": "never"}
    saved = {"checkpoint": str(tmp_path), "checkpoint_every": 1, "num_checkpoints": 8}
    data, double = Vectors(30, {3, 20}), torch.float64
    expected, told = fitted(network(double), data, **settings, **saved)
    settings["resume"] = f"{tmp_path}/step-00000002.pt"
    weights, again = fitted(network(double), data, **settings)
    assert weights == expected
    for events in (told, again):
        skipped = [event.skipped for event in events if isinstance(event, DataEvent)]
        named = [url for one in skipped for url in one]
        assert named == ["vectors/3", "vectors/20"] * 2


class Breaks(torch.optim.SGD):
    num_steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        if self.num_steps == 5:
            self.param_groups[0]["params"][0].data.zero_()
            raise ValueError("half a step")
        super().step(closure)


def test_a_failure_while_weights_change_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="half a step"):
        fitted(network(), optimizer=Breaks, checkpoint=str(tmp_path), checkpoint_every=2)
    assert Checkpoints(str(tmp_path)).names() == ["step-00000002.pt", "step-00000004.pt"]


def test_an_interrupt_does_not_keep_the_last_checkpoint_from_being_told(tmp_path: Path) -> None:
    told: list[Event] = []

    def emit(events: Sequence[Event]) -> None:
        if any(isinstance(event, CheckpointEvent) for event in events):
            signal.raise_signal(signal.SIGINT)  # as the pool does again after a second
        told.extend(events)

    def breaks(info: CallbackInfo) -> None:
        if info.event == "step" and info.step == 3:
            raise ValueError("mine")

    options = TrainingOptions(batch_size=8, checkpoint=str(tmp_path), callbacks=[breaks])
    world = World(0, 1, torch.device("cpu"))
    with pytest.raises(ValueError, match="mine"):
        fit(network(), samples(30), "cross_entropy", options, world=world, emit=emit)
    assert [event.step for event in told if isinstance(event, CheckpointEvent)] == [3]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


# ---- what modules keep (`get_extra_state`) -------------------------------------------------------


class Counter(nn.Identity):
    """Counts steps in a dict that it gives away itself, and has a buffer from its first batch on.

    Its state has a None, too, and a version, without which it would not take the state back.
    """

    _version = 3
    mask: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"steps": 0, "name": b"\xff", "sizes": (torch.zeros(1), [None, 1.5])}
        self.register_buffer("mask", None)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.full((8,), 0.5)
        return inputs * self.mask

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
    assert result.model[0].mask.tolist() == [0.5] * 8  # type: ignore[index,union-attr]
    assert steps(gpupool.load_weights(counting(), str(result.checkpoint))) == 9


class Configured(nn.Identity):
    def __init__(self, word: Any) -> None:
        super().__init__()
        self.word = word

    def get_extra_state(self) -> Any:
        return self.word


def test_what_cannot_be_kept_is_said_before_training(pools: Pools) -> None:
    for word, named in ((Path(), "Path"), (iter([1]), "")):
        with raises(TrainingError, named):
            train_on(pools[1], nn.Sequential(network(), Configured(word)), samples(24))
