"""Whatever a training holds is in its checkpoint: every optimizer, scaled losses, what was told."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.wire.events import (
    CheckpointEvent,
    DataEvent,
    Event,
    StepEvent,
)
from gpupool.engine.group.forming import World
from gpupool.engine.training.callbacks import CallbackInfo
from gpupool.engine.training.checkpoints import Checkpoints
from gpupool.engine.training.loop import fit
from tests.engine.training.vectors import Vectors
from tests.support.trainings import network, samples

ALONE = World(0, 1, torch.device("cpu"))


def fitted(
    model: nn.Module, dataset: Any = None, **settings: Any
) -> tuple[dict[str, bytes], list[Event]]:
    """The bytes of the weights after training here, without a pool, and what was told."""
    told: list[Event] = []
    options = TrainingOptions(**{"batch_size": 8, "epochs": 2, "lr": 1e-3} | settings)
    data = samples(30) if dataset is None else dataset
    result = fit(model, data, "cross_entropy", options, world=ALONE, emit=told.extend)
    state = result.model.state_dict()
    return {name: tensor.numpy().tobytes() for name, tensor in state.items()}, told


def flat() -> nn.Module:
    """A network of images of one pixel."""
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
    """Fails in the middle of the fifth step."""

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
    with pytest.raises(ValueError, match="mine"):
        fit(network(), samples(30), "cross_entropy", options, world=ALONE, emit=emit)
    assert [event.step for event in told if isinstance(event, CheckpointEvent)] == [3]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
