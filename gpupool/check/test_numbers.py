"""What trainings compute. Runs on the client."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import gpupool
from gpupool import Pool, SpmdError
from gpupool.check import cells
from gpupool.check.bench import Tell

_train: Any = functools.partial(gpupool.train, progress="none")  # quietly


def _pictures(number: int, size: int) -> TensorDataset:
    """Noise in three colours, each with the index of the brightest colour."""
    inputs = torch.randn(number, 3, size, size, generator=torch.Generator().manual_seed(2))
    return TensorDataset(inputs, inputs.mean((2, 3)).argmax(1))


def _convolutions() -> nn.Module:
    """A network with batch norm, which GPUs can compute deterministically."""
    torch.manual_seed(0)
    first = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
    second = nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU()
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3))


def _apart(one: nn.Module, other: nn.Module) -> float:
    first, second = (
        torch.cat([value.double().flatten() for value in model.state_dict().values()])
        for model in (one, other)
    )
    return float((first - second).abs().max())


def test_exact(pool: Pool, tell: Tell) -> None:
    """several ranks train what one trains: float64, uneven shares, batch norm over all"""
    inputs, targets = _pictures(100, 8).tensors
    data, model = TensorDataset(inputs.double(), targets), _convolutions().double()
    size, epochs, lr = 26, 2, 0.05
    many = _train(
        model, data, batch_norm="sync", batch_size=size, epochs=epochs, lr=lr, shuffle="never"
    )
    one = pool.run(cells.train_alone, model, data, size, epochs, lr)[0]
    apart = _apart(many.model, one)
    assert apart <= 1e-12, f"weights differ by {apart:.1e} from those of one rank"
    tell(f"{apart:.0e} from one rank")


@pytest.mark.usefixtures("pool")
def test_bits(tmp_path: Path, tell: Tell) -> None:
    """with deterministic=True a resumed training has the bits of one that was not interrupted"""
    data, checkpoint = _pictures(640, 16), str(tmp_path)
    options = {"batch_size": 64, "epochs": 2, "lr": 0.1, "deterministic": True}
    whole = _train(_convolutions(), data, **options)
    _train(_convolutions(), data, checkpoint=checkpoint, max_steps=13, **options)
    rest = _train(_convolutions(), data, checkpoint=checkpoint, resume="auto", **options)
    apart = _apart(whole.model, rest.model)
    assert not apart, f"{apart:.1e} apart"
    tell("equal")


@pytest.fixture
def long(on_gpus: bool) -> dict[str, Any]:
    """A training whose host runs far ahead of its devices."""
    width, depth, batch_size = (2048, 5, 1024) if on_gpus else (32, 1, 128)
    torch.manual_seed(0)
    hidden = [layer for _ in range(depth) for layer in (nn.LazyLinear(width), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.LazyLinear(3))
    inputs = torch.randn(200 * batch_size, 64, generator=torch.Generator().manual_seed(1))
    model(inputs[:1])
    return {
        "model": model,
        "dataset": TensorDataset(inputs, inputs[:, :3].argmax(1)),
        "batch_size": batch_size,
        "epochs": 3,
        "lr": 0.05,
        "deterministic": True,  # else two that met nothing may differ on GPUs
    }


def _equal(long: dict[str, Any], found: nn.Module, step: int, words: str) -> str:
    """Fails unless a network is that of a training which met nothing."""
    apart = _apart(_train(**long, max_steps=step).model, found)
    assert not apart, f"{apart:.1e} apart: {words}"
    return f"equal to the last bit: {words}"


def test_failure(long: dict[str, Any], last: int, tmp_path: Path, tell: Tell) -> None:
    """no checkpoint is made of what an aborted collective has left"""

    def fails(info: Any) -> None:  # while the others have queued what comes behind it
        if (info.event, info.step, info.rank) == ("step", 60, last):
            raise ValueError("on purpose")

    options = {"max_steps": 90, "checkpoint": str(tmp_path), "checkpoint_every": 10_000}
    with pytest.raises(SpmdError) as caught:
        _train(**long, **options, callbacks=[fails])
    assert caught.value.first.rank == last
    kept = sorted(tmp_path.glob("step-*.pt"))
    if not kept:
        tell("none was kept")
        return
    step = int(kept[-1].stem.partition("-")[2])
    saved = gpupool.load_weights(long["model"], kept[-1])
    tell(_equal(long, saved, step, f"the checkpoint of step {step}"))


def test_resume(
    pool: Pool, long: dict[str, Any], last: int, on_gpus: bool, tmp_path: Path, tell: Tell
) -> None:
    """kill -9 in a training with on_failure="resume" changes nothing of its outcome"""
    every = 100 if on_gpus else 50
    kept = {"checkpoint": str(tmp_path), "checkpoint_every": every, "on_failure": "resume"}
    run = _train(**long, **kept, max_steps=4 * every, wait=False)
    deadline = time.monotonic() + 60
    while len(run.history.steps) < 1.5 * every and not run.done() and time.monotonic() < deadline:
        time.sleep(0.005)
    if not run.done():
        os.kill(pool.status().pids[last], signal.SIGKILL)
    result = run.result()
    if not result.history.restarts:
        pytest.skip("it was over before the death was noticed")
    how = result.history.restarts[-1].rpartition("; ")[2]
    tell(_equal(long, result.model, 4 * every, how))
