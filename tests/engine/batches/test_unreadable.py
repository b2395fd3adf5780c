"""Training on data that cannot all be read: what is skipped counts nowhere, on any ranks."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpupool import ImageDatastore, Pool, SpmdError, TrainingHistory, TrainingOptions, TrainingRun
from gpupool.core.options import training_options
from gpupool.data.reading.samples import Skipped
from gpupool.data.reading.shards import epoch_order
from gpupool.engine.batches.read_counts import Pass
from tests.engine.training.vectors import Vectors
from tests.servers.s3 import SeaweedServer
from tests.servers.slow_s3 import Fault, SlowS3
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on, wait_until, weights

DOUBLE = torch.float64
SKIP: dict[str, Any] = {"on_error": "skip"}


@pytest.fixture
def lenient(pools: Pools) -> Iterator[Pools]:
    """Pools whose ranks leave out any number of samples."""
    for share in (1.0, training_options.MAX_SKIPPED):
        for pool in pools.values():
            pool.run(
                f"from gpupool.core.options import training_options as o\no.MAX_SKIPPED = {share}"
            )
        if share == 1.0:
            yield pools


def by_hand(data: Vectors, batch_size: int, epochs: int) -> tuple[nn.Module, list[float]]:
    """What training must give: plain torch, one process, the mean over what can be read."""
    model, losses = network(DOUBLE), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for epoch in range(1, epochs + 1):
        order = epoch_order(len(data), 0, epoch)
        for start in range(0, len(data), batch_size):
            good = [i for i in order[start : start + batch_size].tolist() if i not in data.bad]
            optimizer.zero_grad()
            if good:
                outputs = model(data.inputs[good])
                loss = nn.functional.cross_entropy(outputs, data.targets[good])
                loss.backward()
                losses.append(loss.item())
            else:
                sum((p * 0).sum() for p in model.parameters()).backward()
                losses.append(math.nan)
            optimizer.step()
    return model, losses


@pytest.mark.parametrize(
    ("num", "bad", "batch_size"),
    [(50, {3, 17, 20, 41}, 12), (9, {0, 4, 5, 8}, 2)],
    ids=["some", "all of a rank or of a batch"],
)
def test_what_is_skipped_counts_nowhere_at_any_number_of_ranks(
    lenient: Pools, num: int, bad: set[int], batch_size: int
) -> None:
    data, held_out = Vectors(num, bad), Vectors(20, {1, 2})
    model, losses = by_hand(data, batch_size, epochs=3)
    with torch.no_grad():
        outputs, targets = model(held_out.inputs), held_out.targets
    good = [index for index in range(20) if index not in held_out.bad]
    expected = nn.functional.cross_entropy(outputs[good], targets[good]).item()
    settings = {**SKIP, "batch_size": batch_size, "lr": 0.1, "epochs": 3, "keep": "last"}
    for pool in lenient.values():
        result = train_on(pool, network(DOUBLE), data, validation=held_out, **settings)
        history = result.history
        assert history.loss == pytest.approx(losses, abs=1e-12, nan_ok=True)
        assert (weights(result.model) - weights(model)).abs().max() < 1e-12
        assert result.skipped == {f"vectors/{index}": "damaged" for index in bad | held_out.bad}
        assert history.reads.num_skipped == 3 * (len(bad) + 2)
        assert sum(step.num_samples for step in history.steps) == 3 * (num - len(bad))
        assert [event.num_samples for event in history.validations] == [18] * 3
        assert history.validations[-1].loss == pytest.approx(expected, abs=1e-12)


def test_beyond_the_bound_it_is_an_error_on_all_ranks_that_names_some(pools: Pools) -> None:
    data = Vectors(40, {1, 2, 3, 30, 31, 32, 33})
    with raises(SpmdError, "on_error", " 1 ", " vectors/") as caught:
        train_on(pools[2], network(DOUBLE), data, batch_size=40, **SKIP)
    assert [error.ename for error in caught.value.errors.values()] == ["TrainingError"] * 2
    assert "epoch 1: 7 of 40 " in str(caught.value)
    assert str(caught.value).count("(damaged)") == 5
    Pass("epoch 1", 40, 1).add([Skipped("one image", "damaged")] * 7)  # with all its patches


def test_one_sample_may_always_be_skipped_and_by_default_none(pools: Pools) -> None:
    data = Vectors(20, {4})
    history = train_on(pools[2], network(DOUBLE), data, epochs=2, **SKIP).history
    assert (history.reads.num_retried, history.reads.reason) == (20, "503 SlowDown")
    assert "20 reads retried (503 SlowDown)  2 samples skipped" in history.line()
    with pytest.raises(SpmdError, match="vector 4 is damaged"):
        train_on(pools[2], network(DOUBLE), data, epochs=1)


def begun(
    pool: Pool, s3: SeaweedServer, slow: SlowS3, url: str, **settings: Any
) -> tuple[TrainingRun, ImageDatastore]:
    """A training on photos in a store that is in the hands of the test."""
    options = {**s3.storage_options, "client_kwargs": {"endpoint_url": slow.endpoint}}
    data = ImageDatastore(f"{url}/test", storage_options=options)
    wanted = TrainingOptions(batch_size=25, lr=0.01, **settings)
    return TrainingRun(pool, linear(), data, "cross_entropy", wanted, None), data


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 28 * 28, 10))


@pytest.mark.parametrize("gone_s", [4.0, pytest.param(60.0, marks=pytest.mark.long)])
def test_a_store_that_is_gone_for_a_while_ends_no_training(
    pools: Pools, s3: SeaweedServer, photos_url: str, gone_s: float
) -> None:
    with SlowS3(s3.endpoint) as slow:
        run, _ = begun(pools[2], s3, slow, photos_url, epochs=3)
        told: set[str] = set()
        back = threading.Timer(gone_s, slow.be_gone, [False])

        def look(history: TrainingHistory) -> None:
            told.add(history.line() if history.stage.startswith("reading is") else "")
            if history.steps and not back.ident:
                slow.be_gone()
                back.start()

        run.add_listener(look)
        history = run.result().history
        back.join()
    assert len(history.steps) == 12
    assert history.reads.num_retried > 0
    assert any("reading is tried again (no connection)" in line for line in told)


@pytest.mark.parametrize(("kind", "checkpoints"), [("no answer", True), ("503 SlowDown", False)])
def test_the_first_stop_ends_a_training_whose_data_do_not_come(
    pools: Pools,
    s3: SeaweedServer,
    photos_url: str,
    tmp_path: Path,
    kind: str,
    checkpoints: bool,
) -> None:
    """It keeps the network of the last complete step, from which training can go on."""
    settings = {"checkpoint": str(tmp_path)} if checkpoints else {}
    with SlowS3(s3.endpoint) as slow:
        run, data = begun(pools[2], s3, slow, photos_url, **settings, epochs=1000)
        wait_until(lambda: len(run.history.steps) > 4)
        slow.inject(Fault("silence" if kind == "no answer" else "503"))
        time.sleep(1.5)  # what has been read before would go on for a moment
        began = time.monotonic()
        run.stop()
        result = run.result()
        took_s = time.monotonic() - began
        slow.inject()
        assert took_s < 30  # a quarter of what the store is waited for
        assert (result.stopped_by, result.history.status) == ("user", "stopped")
        step = len(result.history.steps)
        assert result.history.end is not None
        assert result.history.end.step == step > 4
        (warning,) = result.warnings
        assert re.search(rf"stopped while rank \d waited for its data, .*{kind}", warning)
        assert torch.isfinite(weights(result.model)).all()
        assert (weights(result.model) - weights(linear())).abs().max() > 0
        if checkpoints:
            assert result.checkpoint == f"{tmp_path}/step-{step:08}.pt"
            more: dict[str, Any] = {**settings, "max_steps": step + 2, "resume": "auto"}
            again = train_on(pools[2], linear(), data, batch_size=25, lr=0.01, **more)
            assert again.history.resumed is not None
            assert again.history.resumed.step == step
        else:
            assert train_on(pools[2], network(), samples(8), epochs=1).stopped_by == "epochs"
