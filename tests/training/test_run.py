"""Training as its user meets it: what comes back, stopping, failing, own losses and models."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from gpupool import (
    DataError,
    GpuPoolError,
    Pool,
    SpmdError,
    TrainingError,
    TrainingOptions,
    TrainingRun,
)

from .conftest import network, samples, train_on, weights

DEADLINE_S = 30.0


class Slow(Dataset[Any]):
    """Samples that take their time, so that a test can act while training goes on."""

    def __init__(self, num: int, delay_s: float) -> None:
        self.samples, self.delay_s = samples(num), delay_s

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.delay_s)
        return self.samples[index]


class FailsAt(Dataset[Any]):
    """Samples of which one cannot be read."""

    def __init__(self, index: int) -> None:
        self.samples, self.index = samples(32), index

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if index == self.index:
            raise DataError(f"sample {index} is damaged")
        return self.samples[index]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.01)


def test_the_result_is_a_new_module_on_the_cpu(pools: dict[int, Pool]) -> None:
    model = network()
    before = weights(model).clone()
    result = train_on(pools[2], model, samples(32), epochs=2, batch_size=8)
    assert torch.equal(weights(model), before)
    assert result.model is not model
    assert not torch.equal(weights(result.model), before)
    assert {p.device.type for p in result.model.parameters()} == {"cpu"}
    assert result.stopped_by == "epochs"
    assert result.throughput > 0
    assert "finished" in repr(result)


def test_the_history_tells_what_was_done(pools: dict[int, Pool]) -> None:
    history = train_on(pools[2], network(), samples(32), epochs=2, batch_size=8).history
    start = history.start
    assert start is not None
    assert (start.num_epochs, start.steps_per_epoch, start.world_size) == (2, 4, 2)
    assert (start.device, start.backend) == ("CPU", "gloo")
    assert history.status == "finished"
    assert history.progress == 1.0
    times = [s.elapsed_s for s in history.steps]
    assert times == sorted(times)


def test_uint8_images_reach_the_network_as_floats_up_to_1(pools: dict[int, Pool]) -> None:
    images = torch.full((8, 3, 4, 4), 255, dtype=torch.uint8)
    data = torch.utils.data.TensorDataset(images, torch.zeros(8, dtype=torch.int64))

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean((1, 2, 3)).unsqueeze(1) * self.scale

    loss = lambda outputs, targets: outputs.mean()  # noqa: E731 - a lambda travels too
    history = train_on(pools[2], Mean(), data, loss=loss, lr=1e-9, batch_size=8, epochs=1).history
    assert history.loss == [pytest.approx(1.0)]


def test_a_regression_has_a_loss_and_no_accuracy(pools: dict[int, Pool]) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randn(16, 3))
    history = train_on(pools[2], network(), data, loss="mse", batch_size=4, epochs=1).history
    assert history.accuracy == [None] * 4
    assert history.loss[0] > 0


def test_stop_ends_all_ranks_after_the_same_step_and_keeps_the_network(
    pools: dict[int, Pool],
) -> None:
    options = TrainingOptions(batch_size=4, epochs=100, log_every=2)
    run = TrainingRun(pools[2], network(), Slow(40, 0.002), "cross_entropy", options, None)
    wait_until(lambda: len(run.history.steps) > 4)
    run.stop()
    result = run.result()
    assert run.done()
    assert result.stopped_by == "user"
    assert result.history.status == "stopped"
    assert 4 < len(result.history.steps) < 1000
    assert torch.isfinite(weights(result.model)).all()
    assert train_on(pools[2], network(), samples(8), epochs=1).stopped_by == "epochs"


def test_the_first_interrupt_is_a_stop(pools: dict[int, Pool]) -> None:
    options = TrainingOptions(batch_size=4, epochs=100, log_every=2)
    run = TrainingRun(pools[2], network(), Slow(40, 0.002), "cross_entropy", options, None)
    wait_until(lambda: len(run.history.steps) > 4)
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
    assert run.result().stopped_by == "user"


def test_listeners_hear_of_every_event_and_of_the_end(pools: dict[int, Pool]) -> None:
    seen: list[tuple[str, int]] = []
    options = TrainingOptions(batch_size=4, epochs=2, log_every=1)
    run = TrainingRun(pools[2], network(), Slow(16, 0.001), "cross_entropy", options, None)
    run.add_listener(lambda history: seen.append((history.status, len(history.steps))))
    run.result()
    assert seen[-1] == ("finished", 8)
    assert [n for _, n in seen] == sorted(n for _, n in seen)


@pytest.mark.parametrize("index", [0, 31])
def test_a_sample_that_cannot_be_read_ends_training_on_all_ranks_with_one_error(
    pools: dict[int, Pool], index: int
) -> None:
    with pytest.raises(SpmdError) as caught:
        train_on(pools[2], network(), FailsAt(index), batch_size=8, epochs=1, shuffle="never")
    assert caught.value.first.ename == "DataError"
    assert f"sample {index} is damaged" in str(caught.value)
    assert "gpupool/" not in "".join(caught.value._render_traceback_())
    result = train_on(pools[2], network(), samples(8), epochs=1)
    assert result.stopped_by == "epochs"


def test_learn_rate_factors_scale_the_step_of_the_parameters_they_name(
    pools: dict[int, Pool],
) -> None:
    settings = {"batch_size": 32, "lr": 1e-3, "epochs": 1, "shuffle": "never"}
    start = network()
    plain = train_on(pools[2], start, samples(32), **settings).model
    scaled = train_on(
        pools[2], start, samples(32), learn_rate_factors={"2.weight": 10, "2.bias": 20}, **settings
    ).model
    for name, factor in {"0.weight": 1, "2.weight": 10, "2.bias": 20}.items():
        before = start.get_parameter(name)
        step = plain.get_parameter(name) - before
        assert torch.allclose(scaled.get_parameter(name) - before, factor * step, atol=1e-6)


def test_a_factor_of_0_freezes_also_the_statistics_of_batch_norm(pools: dict[int, Pool]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    trained = train_on(
        pools[2], model, samples(32), batch_size=8, epochs=1, learn_rate_factors={"[01].*": 0}
    ).model
    assert torch.equal(trained.get_parameter("0.weight"), model.get_parameter("0.weight"))
    assert torch.equal(trained.get_buffer("1.running_mean"), torch.zeros(8))
    assert not torch.equal(trained.get_parameter("2.weight"), model.get_parameter("2.weight"))


def test_a_pattern_that_matches_nothing_is_an_error_that_names_parameters(
    pools: dict[int, Pool],
) -> None:
    with pytest.raises(SpmdError, match=r"'fc\.\*' matches no parameter.*0\.weight"):
        train_on(pools[2], network(), samples(8), learn_rate_factors={"fc.*": 10})


def test_bad_input_is_refused_before_any_rank_starts(pools: dict[int, Pool]) -> None:
    cases: list[tuple[Any, Any, type[GpuPoolError], str]] = [
        (nn.Linear, samples(8), TrainingError, "Call it"),
        (None, samples(8), TrainingError, "NoneType, not a torch.nn.Module"),
        (network(), 5, TrainingError, "needs len"),
        (network(), samples(8).tensors[0][:0], TrainingError, "dataset is empty"),
    ]
    for model, data, kind, text in cases:
        with pytest.raises(kind, match=text):
            TrainingRun(pools[2], model, data, "cross_entropy", TrainingOptions(), None)


def test_what_cannot_be_pickled_is_named(pools: dict[int, Pool]) -> None:
    data = Slow(8, 0.0)
    data.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(TrainingError, match="dataset cannot be sent to the ranks"):
        train_on(pools[2], network(), data)


def test_an_unknown_loss_is_refused_with_the_names_there_are(pools: dict[int, Pool]) -> None:
    with pytest.raises(TrainingError, match=r"loss='crossentropy'.*'cross_entropy'"):
        train_on(pools[2], network(), samples(8), loss="crossentropy")


def test_files_of_a_training_do_not_pile_up(pools: dict[int, Pool]) -> None:
    folder = pools[2].new_file("x").parent
    train_on(pools[2], network(), samples(8), epochs=1)
    left = [path.name for path in folder.iterdir() if path.suffix in (".pkl", ".pt")]
    assert left == []
