"""What trainings compute, and how fast. Runs on the client."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

import gpupool
from gpupool.check import cells, networks
from gpupool.check.bench import Bench, Tell
from gpupool.core.errors import SpmdError

if TYPE_CHECKING:
    from torch import nn

_EXACT = 1e-12  # of float64
_SLOW = 0.85  # of the rate of a loop by hand is a fault


@pytest.mark.timeout(120)
def test_exact(bench: Bench, tell: Tell) -> None:
    """several ranks train what one trains: float64, uneven shares, batch norm over all"""
    data, model = networks.pictures(100, 8, double=True), networks.convolutions(double=True)
    size, epochs, lr = 26, 2, 0.05
    many = bench.train(
        model, data, batch_norm="sync", batch_size=size, epochs=epochs, lr=lr, shuffle="never"
    )
    one = bench.call(cells.train_alone, model, data, size, epochs, lr)[0]
    apart = networks.apart(many.model, one)
    assert apart <= _EXACT, f"weights differ by {apart:.1e} from those of one rank"
    tell(f"{apart:.0e} from one rank")


@pytest.mark.timeout(120)
def test_bits(bench: Bench, tell: Tell) -> None:
    """with deterministic=True a resumed training has the bits of one that was not interrupted"""
    for name, make, data in (
        ("linear layers", networks.layers, networks.points(640, 8)),
        ("convolutions", networks.convolutions, networks.pictures(640, 16)),
    ):
        options = {"batch_size": 64, "epochs": 2, "lr": 0.1, "deterministic": True}
        folder = str(bench.folder / f"bits-{name}")
        whole = bench.train(make(), data, **options)
        bench.train(make(), data, checkpoint=folder, max_steps=13, **options)
        rest = bench.train(make(), data, checkpoint=folder, resume="auto", **options)
        apart = networks.apart(whole.model, rest.model)
        assert not apart, f"{name}: {apart:.1e} apart"
    tell("linear layers and convolutions are equal")


@pytest.mark.timeout(180)
def test_throughput(bench: Bench, tell: Tell) -> None:
    """as fast as a DDP loop by hand: ResNet-18, channels last, bf16 on GPUs"""
    import torch
    from torch.utils.data import TensorDataset

    size, per_rank, steps = (128, 128, 80) if bench.on_gpus else (32, 4, 8)
    batch = per_rank * bench.n
    by_hand = sum(bench.call(cells.train_by_hand, per_rank, size, steps, limit_s=120.0).values())
    generator = torch.Generator().manual_seed(4)
    images = torch.randint(
        0, 256, (10 * batch, 3, size, size), dtype=torch.uint8, generator=generator
    )
    labels = torch.randint(0, 10, (10 * batch,), generator=generator)
    result = bench.train(
        networks.resnet18(),
        TensorDataset(images, labels),
        batch_size=batch,
        epochs=-(-steps // 10),
        lr=0.01,
        precision="bf16" if bench.on_gpus else "float32",
        channels_last=True,
    )
    done = result.history.steps
    first, last = done[len(done) // 4], done[-1]
    ours = (last.step - first.step) * batch / (last.elapsed_s - first.elapsed_s)
    words = f"{ours:,.0f} images/s, by hand {by_hand:,.0f} ({ours / by_hand:.0%})"
    waits = result.history.data_wait_share
    words += f"; {waits:.0%} of the time it waited for data" if waits > 0.05 else ""
    # a handful of steps of a busy CPU says little
    assert not bench.on_gpus or ours >= _SLOW * by_hand, words
    tell(words)


@pytest.mark.timeout(180)
def test_failure(bench: Bench, tell: Tell) -> None:
    """no checkpoint is made of what an aborted collective has left"""
    bench.needs_ranks()
    training = LongTraining(bench)
    folder = bench.folder / "failure"
    # The last rank fails in step 61, while the others have queued what comes behind it.
    at = 60 * training.options["batch_size"] // bench.n + 1
    damaged = networks.Damaged(training.data, bench.last, at)
    with pytest.raises(SpmdError) as caught:
        bench.train(
            training.model,
            damaged,
            max_steps=90,
            checkpoint=str(folder),
            checkpoint_every=10_000,
            workers=0,  # each process that reads would count its own samples
            **training.options,
        )
    assert caught.value.first.rank == bench.last
    kept = sorted(folder.glob("step-*.pt"))
    if not kept:
        tell("none was kept")
        return
    step = int(kept[-1].stem.partition("-")[2])
    saved = gpupool.load_weights(training.model, kept[-1])
    tell(training.compared(saved, step, f"the checkpoint of step {step}"))


@pytest.mark.timeout(240)
def test_resume(bench: Bench, tell: Tell) -> None:
    """kill -9 in a training with on_failure="resume" changes nothing of its outcome"""
    bench.needs_ranks()
    training, every = LongTraining(bench), 100 if bench.on_gpus else 50
    options = gpupool.TrainingOptions(
        progress="none",
        checkpoint=str(bench.folder / "resume"),
        checkpoint_every=every,
        on_failure="resume",
        max_steps=4 * every,
        **training.options,
    )
    run = gpupool.train(training.model, training.data, options=options, wait=False)
    deadline = time.monotonic() + 60
    while len(run.history.steps) < 1.5 * every and not run.done() and time.monotonic() < deadline:
        time.sleep(0.005)
    if not run.done():
        os.kill(bench.pids()[bench.last], signal.SIGKILL)
    result = run.result()
    if not result.history.restarts:
        pytest.skip("it was over before the death was noticed")
    how = result.history.restarts[-1].rpartition("; ")[2]
    tell(training.compared(result.model, 4 * every, how))


class LongTraining:
    """A training whose host runs far ahead of its devices."""

    def __init__(self, bench: Bench) -> None:
        width, depth, batch_size = (2048, 5, 1024) if bench.on_gpus else (32, 1, 128)
        self._bench = bench
        self.model = networks.layers(64, width, depth)
        self.data = networks.points(200 * batch_size, 64)
        self.options: dict[str, Any] = {
            "batch_size": batch_size,
            "epochs": 3,
            "lr": 0.05,
            "deterministic": True,  # else two that met nothing may differ on GPUs
        }

    def compared(self, found: nn.Module, steps: int, words: str) -> str:
        """Compare a network with that of a training which met nothing: fails, or says how equal."""
        options = self.options | {"max_steps": steps}
        whole = self._bench.train(self.model, self.data, **options).model
        apart = networks.apart(whole, found)
        assert not apart, f"{apart:.1e} apart: {words}"
        return f"equal to the last bit: {words}"
