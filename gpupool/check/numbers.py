"""Checks of what trainings compute, and how fast. Runs on the client."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import gpupool
from gpupool.check import cells, networks
from gpupool.check.bench import Bench
from gpupool.check.promise import Check, Found, NotKeptError, NotTriedError, check
from gpupool.core.errors import SpmdError

if TYPE_CHECKING:
    from torch import nn

_EXACT = 1e-12  # of float64
_SLOW = 0.85  # of the rate of a loop by hand is worth a look


@check(limit_s=120.0)
def exact(bench: Bench) -> Found:
    """several ranks train what one trains: float64, uneven shares, batch norm over all"""
    data, model = networks.pictures(100, 8, double=True), networks.convolutions(double=True)
    size, epochs, lr = 26, 2, 0.05
    many = bench.train(
        model, data, batch_norm="sync", batch_size=size, epochs=epochs, lr=lr, shuffle="never"
    )
    one = bench.call(cells.train_alone, model, data, size, epochs, lr)[0]
    apart = networks.apart(many.model, one)
    if not apart <= _EXACT:
        raise NotKeptError(f"weights differ by {apart:.1e} from those of one rank")
    return Found(f"{apart:.0e} from one rank", apart=apart)


@check(limit_s=90.0)
def mixed(bench: Bench) -> Found:
    """bf16 and fp16 learn"""
    texts = []
    for precision in ("bf16", "fp16") if bench.on_gpus else ("bf16",):
        result = bench.train(
            networks.layers(),
            networks.points(512, 8),
            batch_size=64,
            epochs=8,
            lr=0.2,
            precision=precision,
        )
        first, last = result.history.loss[0], result.history.loss[-1]
        if not last < 0.9 * first:
            raise NotKeptError(f"{precision}: loss {first:.3f} to {last:.3f}")
        texts.append(f"{precision} loss {first:.2f} to {last:.2f}")
    return Found(", ".join(texts))


@check(limit_s=120.0)
def bits(bench: Bench) -> Found:
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
        if apart:
            twin = bench.train(make(), data, **options)
            drift = networks.apart(whole.model, twin.model)
            raise NotKeptError(f"{name}: {apart:.1e} apart; two whole trainings {drift:.1e}")
    return Found("linear layers and convolutions are equal")


@check(limit_s=180.0)
def throughput(bench: Bench) -> Found:
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
    is_slow = bench.on_gpus and ours < _SLOW * by_hand
    return Found(words, is_note=is_slow, images_s=ours, by_hand_images_s=by_hand)


@check(limit_s=180.0)
def failure(bench: Bench) -> Found:
    """no checkpoint is made of what an aborted collective has left"""
    bench.needs_ranks()
    training = LongTraining(bench)
    folder = bench.folder / "failure"
    # The last rank fails in step 61, while the others have queued what comes behind it.
    at = 60 * training.options["batch_size"] // bench.n + 1
    damaged = networks.Damaged(training.data, bench.last, at)
    try:
        bench.train(
            training.model,
            damaged,
            max_steps=90,
            checkpoint=str(folder),
            checkpoint_every=10_000,
            workers=0,  # each process that reads would count its own samples
            **training.options,
        )
    except SpmdError as error:
        if error.first.rank != bench.last:
            raise NotKeptError(f"it is reported as one of rank {error.first.rank}") from None
    else:
        raise NotKeptError("the training did not fail")
    kept = sorted(folder.glob("step-*.pt"))
    if not kept:
        return Found("none was kept")
    step = int(kept[-1].stem.partition("-")[2])
    saved = gpupool.load_weights(training.model, kept[-1])
    return training.compared(saved, step, f"the checkpoint of step {step}")


@check(limit_s=240.0)
def resume(bench: Bench) -> Found:
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
        raise NotTriedError("it was over before the death was noticed")
    how = result.history.restarts[-1].rpartition("; ")[2]
    return training.compared(result.model, 4 * every, how)


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

    def compared(self, found: nn.Module, steps: int, words: str) -> Found:
        """Compare a network with that of a training which met nothing. Raises NotKeptError."""
        whole = self._undisturbed(steps)
        apart = networks.apart(whole, found)
        if apart:  # is it the fault, or do two such trainings differ anyway?
            drift = networks.apart(whole, self._undisturbed(steps))
            raise NotKeptError(f"{apart:.1e} apart, two undisturbed ones {drift:.1e}: {words}")
        return Found(f"equal to the last bit: {words}")

    def _undisturbed(self, steps: int) -> nn.Module:
        options = self.options | {"max_steps": steps}
        return self._bench.train(self.model, self.data, **options).model


NUMBERS: tuple[Check[Bench], ...] = (
    exact,
    mixed,
    bits,
    throughput,
    failure,
    resume,
)
