"""Training as its user meets it: what comes back, stopping, failing, own losses and models."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from gpupool import (
    DataError,
    Pool,
    SpmdError,
    TrainingError,
    TrainingOptions,
    TrainingResult,
    TrainingRun,
    TransferError,
    load_weights,
    predict,
    replace_head,
)
from gpupool.notebook.cells.views import QuietView
from gpupool.pool.calls.presses import SAME_WISH_S, heard_by
from gpupool.spmd.cell import Notebook, SpmdRun
from gpupool.training.history import TrainingHistory
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import Held, Slow, network, samples, train_on, wait_until, weights


def begun(
    pool: Pool,
    dataset: Any,
    show: Callable[[TrainingRun], None] = lambda run: None,
    **settings: Any,
) -> TrainingRun:
    options = TrainingOptions(**{"batch_size": 4, "epochs": 1} | settings)
    return TrainingRun(pool, network(), dataset, "cross_entropy", options, None, show)


class Deadly(Slow):
    def __getitem__(self, index: int) -> Any:
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_rank_that_dies_at_one_place_again_ends_the_training(
    pools: Pools, tmp_path: Path
) -> None:
    run = begun(pools[1], Deadly(32, 0.0), checkpoint=str(tmp_path), on_failure="resume", workers=0)
    with raises(SpmdError, ename="EngineDiedError"):
        run.result()
    assert len(run.history.restarts) == 1


def test_the_result_is_a_new_module_on_the_cpu(pools: Pools) -> None:
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
    folder = pools[2].engines.new_file("x").parent
    assert not [path for path in folder.iterdir() if path.suffix in (".pkl", ".pt")]


OF_MODULE = """
import threading
import time
class Log:
    def __init__(self): self._lock, self.lines = threading.Lock(), []
    def info(self, text, *words): print(text.format(*words))
log = Log()
"""


def test_what_an_import_gives_travels_by_its_name(
    pool2: Pool, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log_of_test.py").write_text(OF_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    exec("from log_of_test import log\ndef noisy(info): log.info('step {}', info.step)", names)
    source, view = "log.info('rank {}', rank)", QuietView()
    result = SpmdRun(pool2, source, (0, 1), view, notebook=Notebook(names, str)).result()
    assert [result.text(rank) for rank in (0, 1)] == ["rank 0\n", "rank 1\n"]
    settings = {"callbacks": names["noisy"], "epochs": 1, "batch_size": 8}
    found = train_on(pool2, network(), samples(8), **settings)
    assert "step 1" in found.text(0)
    exec("import threading; log = threading.Lock()", names)  # no module has this one
    with raises(TrainingError, "options", "callbacks[0]", " log"):
        train_on(pool2, network(), samples(8), **settings)


def test_weights_that_a_hook_computes_are_trained(pools: Pools) -> None:
    """And what is noted at a parameter comes along."""
    normed, pruned = nn.Sequential(nn.Linear(8, 3)), nn.Sequential(nn.Linear(8, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch names a newer way
        nn.utils.weight_norm(normed[0])
    prune.l1_unstructured(pruned[0], "weight", amount=0.5)
    pruned[0].bias.no_decay = True
    for net, names in (
        (normed, ["0.bias", "0.weight_g", "0.weight_v"]),
        (pruned, ["0.bias", "0.weight_orig"]),
    ):
        one, two = (
            train_on(pools[num], net, samples(64), epochs=1, batch_size=16).model for num in (1, 2)
        )
        assert [name for name, _ in two.named_parameters()] == names
        assert torch.allclose(weights(one), weights(two), rtol=0, atol=1e-6)
        assert not torch.equal(weights(two), weights(net))
        assert predict(two, samples(8), pool=pools[2]).shape == (8, 3)
    assert (two(torch.ones(1, 8)).shape, int((two[0].weight == 0).sum())) == ((1, 3), 12)
    assert two[0].bias.no_decay


class HeadOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.Tensor(self.head(self.body(inputs)))

    def state_dict(self, *args: Any, **named: Any) -> Any:
        whole = super().state_dict(*args, **named)
        return {name: one for name, one in whole.items() if not name.startswith("body")}


def test_a_state_without_the_frozen_part_is_trained_and_resumed(
    pools: Pools, tmp_path: Path
) -> None:
    net, saved = HeadOnly(), {"checkpoint": str(tmp_path), "resume": "auto"}
    for settings in ({"epochs": 1}, {"validation": samples(16)}, saved, saved | {"epochs": 2}):
        found: Any = train_on(pools[2], net, samples(64), batch_size=16, **settings).model
        assert torch.equal(found.body.weight, net.body.weight)
        assert not torch.equal(found.head.weight, net.head.weight)
    torch.save(network().state_dict(), tmp_path / "other.pt")
    with raises(DataError, "head.weight", kind="other network"):
        load_weights(net, tmp_path / "other.pt")


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_a_torchscript_network_is_refused_by_its_name(pools: Pools) -> None:
    net = torch.jit.script(nn.Linear(8, 3))
    for attempt in (
        lambda: train_on(pools[2], net, samples(8)),
        lambda: predict(net, samples(8), pool=pools[2]),
        lambda: replace_head(nn.Sequential(net), 2),
    ):
        with raises(TrainingError, "model", "TorchScript", "torch.jit.load"):
            attempt()
    with raises(TransferError, "net", "TorchScript", "torch.jit.load"):
        pools[2]["net"] = net


def test_stop_means_one_training_also_before_it_has_its_turn(pools: Pools, tmp_path: Path) -> None:
    goes_on = tmp_path / "goes on"
    first, second = (begun(pools[2], Held(40, goes_on), epochs=2) for _ in range(2))
    second.stop()
    goes_on.touch()
    assert first.result().stopped_by == "epochs"
    assert second.result().stopped_by == "user"


def test_a_listener_that_fails_harms_nobody(pools: Pools, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []

    def show(run: TrainingRun) -> None:
        run.add_listener(lambda history: heard.append(history.nothing))  # type: ignore[attr-defined]
        run.add_listener(lambda history: heard.append(history.status))

    assert begun(pools[2], samples(16), show).result().stopped_by == "epochs"
    assert heard[-1] == "finished"
    assert "a listener of a training has failed" in caplog.text


def test_it_is_over_when_the_network_is_there_and_not_before(pools: Pools) -> None:
    seen: list[str] = []

    def show(run: TrainingRun) -> None:
        def listen(history: TrainingHistory) -> None:
            seen.append(history.status)
            if len(history.steps) == 2 and history.is_over:
                run.stop()  # too late: all is done

        run.add_listener(listen)

    run = begun(pools[2], samples(8), show, max_steps=2)
    assert run.result().history.status == seen[-1] == "finished"
    assert seen.count("finished") == 1  # the last event of a rank came before it
    assert sorted(run.history.ranks) == [0, 1]


def test_a_frozen_parameter_beside_others_freezes_no_module_below_it(pools: Pools) -> None:
    """As the table of positions of many a network is, at its root."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model.positions = nn.Parameter(torch.ones(8), requires_grad=False)
    trained = train_on(pools[2], model, samples(32), batch_size=8, epochs=1).model
    assert trained[1].num_batches_tracked == 4
    assert not torch.equal(trained.get_buffer("1.running_mean"), torch.zeros(8))


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


# ---- the stop button: the first press stops the training, a later one ends it at once ------------


def long_run(pool: Pool, sample_s: float) -> TrainingRun:
    """A training that has begun, and goes on until it is stopped."""
    run = begun(pool, Slow(64, sample_s), epochs=10_000)
    wait_until(lambda: run.history.start is not None)
    return run


def result_with_presses(run: TrainingRun, *pauses_s: float) -> TrainingResult:
    """What waiting gives, while the stop button is pressed after these pauses."""
    waiting = threading.Event()

    def press_then() -> None:
        waiting.wait()
        for seconds in pauses_s:
            time.sleep(seconds)
            press()

    threading.Thread(target=press_then).start()
    return run.result(waiting.set)


def test_the_first_press_is_a_stop_and_the_network_is_kept(pools: Pools) -> None:
    assert result_with_presses(long_run(pools[2], 0.002), 0.0).stopped_by == "user"


def test_the_first_interrupt_of_the_pool_is_a_stop_and_the_second_ends_it(pools: Pools) -> None:
    run = long_run(pools[2], 0.002)
    pools[2].interrupt()
    assert run.result().stopped_by == "user"
    slow = long_run(pools[2], 20.0)
    pools[2].interrupt()
    wait_until(lambda: slow.history.status == "stopping")
    assert not slow.done()  # its step goes on
    pools[2].interrupt()
    with pytest.raises(SpmdError, match="KeyboardInterrupt"):
        slow.result()


def test_presses_at_once_mean_one_and_a_later_one_ends_it_at_once(pools: Pools) -> None:
    run = long_run(pools[2], 2.0)  # the first step is far away
    with pytest.raises(SpmdError):
        result_with_presses(run, 0.0, 0.1, SAME_WISH_S + 0.2)


def test_an_older_handler_that_is_put_back_late_passes_presses_on() -> None:
    heard: list[str] = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append("before"))
    try:
        with heard_by(lambda first: heard.append(f"first {first}")):
            mine = signal.getsignal(signal.SIGINT)
            press()
            press()
            signal.signal(signal.SIGINT, signal.default_int_handler)  # another cell begins
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, mine)  # it has ended, and puts back what it found
        press()
        assert signal.getsignal(signal.SIGINT) is not mine
        press()
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == ["first True", "before", "before"]
