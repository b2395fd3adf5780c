"""Training on data that cannot all be read: what is skipped counts nowhere, on any ranks."""

from __future__ import annotations

import io
import math
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.transforms import v2

from gpupool import (
    ImageDatastore,
    SpmdError,
    TrainingHistory,
    TrainingOptions,
    TrainingRun,
)
from gpupool.core.errors import DataError
from gpupool.core.options import training_options
from gpupool.data.reading.shards import Indices, epoch_order
from gpupool.engine.batches.shares import as_input, epoch_batches, normalization_of
from tests.engine.training.vectors import Backwards, Vectors
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
        for n in (1, 2, 3):
            pools[n].run(
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
    [
        (50, {3, 17, 20, 41}, 12),
        (9, {0, 4, 5, 8}, 2),
        pytest.param(9, set(range(8)), 3, marks=pytest.mark.long),
    ],
    ids=["some", "all of a rank or of a batch", "nearly all"],
)
def test_what_is_skipped_counts_nowhere_at_any_number_of_ranks(
    lenient: Pools, num: int, bad: set[int], batch_size: int
) -> None:
    data = Vectors(num, bad)
    model, losses = by_hand(data, batch_size, epochs=3)
    for pool in lenient.values():
        settings = {**SKIP, "batch_size": batch_size, "lr": 0.1, "epochs": 3}
        result = train_on(pool, network(DOUBLE), data, **settings)
        assert result.history.loss == pytest.approx(losses, abs=1e-12, nan_ok=True)
        assert (weights(result.model) - weights(model)).abs().max() < 1e-12
        assert result.skipped == {f"vectors/{index}": "damaged" for index in bad}
        assert result.history.reads.num_skipped == 3 * len(bad)
        assert sum(step.num_samples for step in result.history.steps) == 3 * (num - len(bad))


def test_a_validation_skips_too_and_counts_what_is_left(lenient: Pools) -> None:
    held_out = Vectors(20, {2, 3})
    result = train_on(
        lenient[2], network(DOUBLE), Vectors(16, set()), validation=held_out, epochs=2, **SKIP
    )
    assert [event.num_samples for event in result.history.validations] == [18, 18]
    assert set(result.skipped) == {"vectors/2", "vectors/3"}
    good = [index for index in range(20) if index not in held_out.bad]
    with torch.no_grad():
        outputs = result.model(held_out.inputs[good])
    expected = nn.functional.cross_entropy(outputs, held_out.targets[good]).item()
    assert result.history.validations[-1].loss == pytest.approx(expected, abs=1e-12)


def test_beyond_the_bound_it_is_an_error_on_all_ranks_that_names_some(
    pools: Pools,
) -> None:
    data = Vectors(40, {1, 2, 3, 30, 31, 32, 33})
    with raises(SpmdError, "on_error", " 1 ", " vectors/") as caught:
        train_on(pools[2], network(DOUBLE), data, batch_size=40, **SKIP)
    assert [error.ename for error in caught.value.errors.values()] == ["TrainingError"] * 2
    assert "epoch 1: 7 of 40 " in str(caught.value)
    assert str(caught.value).count("(damaged)") == 5
    assert train_on(pools[2], network(), samples(8), epochs=1).stopped_by == "epochs"


def test_one_sample_may_always_be_skipped_and_by_default_none(pools: Pools) -> None:
    data = Vectors(20, {7})
    assert train_on(pools[2], network(DOUBLE), data, on_error="skip", epochs=1).skipped
    with pytest.raises(SpmdError, match="vector 7 is damaged"):
        train_on(pools[2], network(DOUBLE), data, epochs=1)


def test_if_nothing_can_be_read_it_says_so(lenient: Pools) -> None:
    with raises(SpmdError, " 24 "):
        train_on(lenient[1], network(DOUBLE), Vectors(12, set(range(12))), batch_size=12, **SKIP)


def test_retries_of_all_ranks_are_told(pools: Pools) -> None:
    history = train_on(pools[2], network(DOUBLE), Vectors(20, {4}), epochs=2, **SKIP).history
    assert (history.reads.num_retried, history.reads.reason) == (20, "503 SlowDown")
    assert "20 reads retried (503 SlowDown)  2 samples skipped" in history.line()


def test_augmentation_is_the_same_for_every_number_of_ranks(pools: Pools) -> None:
    curves = {
        n: train_on(
            pool, network(DOUBLE), Vectors(30, set(), noise=3.0), batch_size=8, lr=0.1, epochs=2
        ).history.loss
        for n, pool in pools.items()
    }
    assert curves[3] == pytest.approx(curves[1], abs=1e-12)
    quiet = train_on(pools[1], network(DOUBLE), Vectors(30, set()), batch_size=8, lr=0.1, epochs=2)
    assert quiet.history.loss != pytest.approx(curves[1], abs=1e-3)


def test_a_data_set_may_order_its_own_epochs(pools: Pools) -> None:
    settings = {"batch_size": 6, "lr": 0.1, "epochs": 2}
    own = train_on(pools[2], network(DOUBLE), Backwards(20, set()), **settings)
    plain = Vectors(20, set())
    plain.inputs, plain.targets = plain.inputs.flip(0), plain.targets.flip(0)
    same = train_on(pools[1], network(DOUBLE), plain, shuffle="never", **settings)
    assert own.history.loss == pytest.approx(same.history.loss, abs=1e-12)
    options = TrainingOptions(shuffle="never", batch_size=6)
    assert epoch_batches(Backwards(20, set()), options, 1)[0].tolist() == [0, 1, 2, 3, 4, 5]


def test_an_order_that_is_none_is_refused(pools: Pools) -> None:
    class Twice(Vectors):
        def epoch_order(self, seed: int, epoch: int, batch_size: int) -> Indices:
            return np.zeros(len(self), dtype=np.int64)

    with raises(SpmdError, " Twice ", " 20 "):
        train_on(pools[1], network(DOUBLE), Twice(20, set()))


def test_files_that_are_no_images_are_skipped_by_name(lenient: Pools, tmp_path: Path) -> None:
    for index in range(24):
        file = io.BytesIO()
        Image.new("RGB", (8, 8), (index * 10, 255 * (index % 2), 0)).save(file, "JPEG")
        path = tmp_path / "ab"[index % 2] / f"{index:02}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(file.getvalue())
    (tmp_path / "a/06.jpg").write_bytes(b"not an image")
    (tmp_path / "b/07.jpg").write_bytes((tmp_path / "b/07.jpg").read_bytes()[:-40])
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 2))
    data = ImageDatastore(str(tmp_path)).with_transform(v2.RandomCrop(4))
    (tmp_path / "b/09.jpg").unlink()
    settings = {"batch_size": 8, "lr": 0.1, "epochs": 1, **SKIP}
    results = {n: train_on(lenient[n], model, data, **settings) for n in (1, 2)}
    for result in results.values():
        assert result.skipped == {
            f"{tmp_path}/a/06.jpg": "damaged",
            f"{tmp_path}/b/07.jpg": "damaged",
            f"{tmp_path}/b/09.jpg": "missing",
        }
    assert results[1].history.loss == pytest.approx(results[2].history.loss, abs=1e-5)


@pytest.mark.long
def test_a_store_in_trouble_changes_nothing_but_what_the_history_tells(
    pools: Pools, s3: SeaweedServer, photos_url: str
) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 28 * 28, 10))
    settings = {"batch_size": 25, "lr": 0.01, "epochs": 2}

    def histories(endpoint: str, n: int) -> TrainingHistory:
        options = {**s3.storage_options, "client_kwargs": {"endpoint_url": endpoint}}
        data = ImageDatastore(f"{photos_url}/test", storage_options=options)
        return train_on(pools[n], model, data, **settings).history

    quiet = histories(s3.endpoint, 1)
    assert quiet.reads.words() == []
    with SlowS3(s3.endpoint, first_byte_ms=(1, 20)) as slow:
        slow.inject(Fault("503", share=0.1, times=30), Fault("cut", share=0.05, times=10))
        troubled = histories(slow.endpoint, 2)
        faults = slow.stats()
    assert troubled.loss == pytest.approx(quiet.loss, abs=1e-5)
    assert faults["503"] > 0
    assert troubled.reads.num_retried == faults["503"] + faults.get("cut", 0)
    assert "reads retried" in troubled.line()


@pytest.mark.parametrize("gone_s", [4.0, pytest.param(60.0, marks=pytest.mark.long)])
def test_a_store_that_is_gone_for_a_while_ends_no_training(
    pools: Pools, s3: SeaweedServer, photos_url: str, gone_s: float
) -> None:
    with SlowS3(s3.endpoint) as slow:
        options = {**s3.storage_options, "client_kwargs": {"endpoint_url": slow.endpoint}}
        data = ImageDatastore(f"{photos_url}/test", storage_options=options)
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 28 * 28, 10))
        settings = TrainingOptions(batch_size=25, lr=0.01, epochs=3)
        run = TrainingRun(pools[2], model, data, "cross_entropy", settings, None)
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


@pytest.mark.parametrize(
    ("kind", "n", "checkpoints"),
    [
        ("silence", 2, True),
        ("503", 2, False),
        pytest.param("silence", 1, False, marks=pytest.mark.long),
        pytest.param("gone", 2, True, marks=pytest.mark.long),
    ],
)
def test_the_first_stop_ends_a_training_whose_data_do_not_come(
    pools: Pools,
    s3: SeaweedServer,
    photos_url: str,
    tmp_path: Path,
    kind: str,
    n: int,
    checkpoints: bool,
) -> None:
    """It keeps the network of the last complete step, from which training can go on."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 28 * 28, 10))
    settings: dict[str, Any] = {"batch_size": 25, "lr": 0.01}
    if checkpoints:
        settings |= {"checkpoint": str(tmp_path)}
    with SlowS3(s3.endpoint) as slow:
        options = {**s3.storage_options, "client_kwargs": {"endpoint_url": slow.endpoint}}
        data = ImageDatastore(f"{photos_url}/test", storage_options=options)
        wanted = TrainingOptions(**settings, epochs=1000)
        run = TrainingRun(pools[n], model, data, "cross_entropy", wanted, None)
        wait_until(lambda: len(run.history.steps) > 4)
        if kind == "gone":
            slow.be_gone()
        else:
            slow.inject(Fault(kind))
        time.sleep(1.5)  # what has been read before would go on for a moment
        began = time.monotonic()
        run.stop()
        result = run.result()
        took_s = time.monotonic() - began
        slow.be_gone(False)
        slow.inject()
        assert took_s < 30  # a quarter of what the store is waited for
        assert (result.stopped_by, result.history.status) == ("user", "stopped")
        step = len(result.history.steps)
        assert result.history.end is not None
        assert result.history.end.step == step > 4
        reasons = {"silence": "no answer", "503": "503 SlowDown", "gone": "no connection"}
        (warning,) = result.warnings
        expected = rf"stopped while rank \d waited for its data, .*{reasons[kind]}"
        assert re.search(expected, warning)
        assert torch.isfinite(weights(result.model)).all()
        assert (weights(result.model) - weights(model)).abs().max() > 0
        if checkpoints:
            assert result.checkpoint == f"{tmp_path}/step-{step:08}.pt"
            settings |= {"max_steps": step + 2, "resume": "auto"}
            again = train_on(pools[n], model, data, **settings)
            assert again.history.resumed is not None
            assert again.history.resumed.step == step
        else:
            assert train_on(pools[n], network(), samples(8), epochs=1).stopped_by == "epochs"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_network_gets_contiguous_images_however_they_lie_in_memory(dtype: torch.dtype) -> None:
    images = torch.randint(0, 256, (2, 3, 4, 5)).to(dtype)
    by_pixel = images.contiguous(memory_format=torch.channels_last)
    assert as_input(by_pixel).is_contiguous()
    assert torch.equal(as_input(by_pixel), as_input(images))


def test_normalization_is_what_torchvision_computes() -> None:
    class Normalized(Vectors):
        normalization = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

    device = torch.device("cpu")
    images = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    expected = v2.Normalize(*Normalized.normalization)(images.float() / 255)
    normalization = normalization_of(Normalized(4, set()), device)
    assert torch.allclose(as_input(images, normalization), expected, atol=1e-6)
    assert torch.allclose(as_input(images.float() / 255, normalization), expected, atol=1e-6)
    assert normalization_of(Vectors(4, set()), device) is None
    with raises(DataError, " 3 ", " 1;", kind="channels"):
        as_input(images[:, :1], normalization)
