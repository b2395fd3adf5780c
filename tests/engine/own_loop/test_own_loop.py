"""The pieces for loops of one's own: exact on any number of ranks, and what they tell."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import gpupool
from gpupool import OptionsError
from gpupool.core.wire.events import MonitorEvent
from gpupool.engine.group.forming import World
from gpupool.engine.own_loop.monitor import Monitor
from tests.engine.training.vectors import Stream
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on, weights

ALONE = World(0, 1, torch.device("cpu"))


def own_loop(num_samples: int, batch_size: int, epochs: int) -> list[float]:
    """What a user writes, with losses of whole batches; the model is kept for `own_weights`."""
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    dataset = samples(num_samples, torch.float64)
    parallel = DistributedDataParallel(network(torch.float64))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for epoch in range(1, epochs + 1):
        for batch in gpupool.shard_batches(dataset, batch_size, epoch=epoch):
            mean_loss = cross_entropy(parallel(batch.inputs), batch.targets)
            loss = gpupool.weighted_loss(mean_loss, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            whole = loss.detach().clone()
            dist.all_reduce(whole)
            losses.append(whole.item() / dist.get_world_size())
    return [*losses, *weights(parallel.module).tolist()]


@pytest.mark.parametrize(("num_samples", "batch_size"), [(50, 12), (10, 2)])
def test_a_loop_of_these_pieces_equals_train(
    pools: Pools, num_samples: int, batch_size: int
) -> None:
    own = pools[3].run(own_loop, num_samples, batch_size, 3)[0]
    double = torch.float64
    data = samples(num_samples, double)
    result = train_on(pools[1], network(double), data, batch_size=batch_size, lr=0.1, epochs=3)
    expected = [*result.history.loss, *weights(result.model).tolist()]
    assert own == pytest.approx(expected, abs=1e-12)


def test_a_share_of_nothing_with_a_loss_of_nan_counts_nothing() -> None:
    (batch,) = gpupool.shard_batches(samples(4), 4)
    empty = type(batch)(batch.inputs, batch.targets, num_here=0, num_all=4)
    mean = torch.tensor(math.nan, requires_grad=True)
    assert gpupool.weighted_loss(mean, empty).item() == 0


def test_batches_can_be_counted_and_an_epoch_gone_on_with() -> None:
    whole = gpupool.shard_batches(samples(50), 16, epoch=2, seed=7)
    rest = gpupool.shard_batches(samples(50), 16, epoch=2, seed=7, samples_done=32)
    assert (len(whole), len(rest)) == (4, 2)
    with pytest.raises(TypeError, match=r"len\(\)"):
        len(gpupool.shard_batches(Stream(7), 3))
    assert [len(b.targets) for b in whole] == [16, 16, 16, 2]
    for ours, theirs in zip(list(whole)[2:], rest, strict=True):
        assert torch.equal(ours.inputs, theirs.inputs)
    (ordered,) = gpupool.shard_batches(samples(5), 5, shuffle=False)
    assert torch.equal(ordered.inputs, samples(5).tensors[0])
    for name, value in (("epoch", 0), ("samples_done", 51), ("shuffle", "sometimes")):
        wrong: dict[str, Any] = {name: value}
        with raises(OptionsError, name):
            list(gpupool.shard_batches(samples(50), 16, **wrong))


# ---- the monitor -----------------------------------------------------------------------------


def test_what_ranks_record_is_weighed_and_summed(pools: Pools) -> None:
    def recorded() -> tuple[list[MonitorEvent], bool]:
        world, told = World.here(torch.device("cpu")), list[MonitorEvent]()
        with Monitor(world, ["loss", "seen"], 3, "", {}, told.append) as monitor:
            for step in (1, 2, 3):
                loss = torch.tensor(float(world.rank * step) if world.rank else math.nan)
                monitor.record(step, weight=world.rank, loss=loss, seen=world.rank)
                if step == 2:
                    monitor.record(step, seen=torch.tensor(world.rank + 1))
        return told, monitor.stop

    by_rank = pools[3].run(recorded)
    (events, _), *others = (by_rank[rank] for rank in range(3))
    seen = pytest.approx((1 + 4) / 3)
    assert [(step, metrics) for event in events for step, _, metrics in event.rows] == [
        (1, {"loss": pytest.approx((1 + 4) / 3), "seen": seen}),
        (2, {"loss": pytest.approx((2 + 8) / 3), "seen": seen}),
        (2, {"seen": pytest.approx(2)}),
        (3, {"loss": pytest.approx((3 + 12) / 3), "seen": seen}),
    ]
    assert (events[0].status, events[-1].status) == ("running", "finished")
    assert events[0].groups == {"loss": ["loss"], "seen": ["seen"]}
    assert others == [([], False)] * 2


def test_a_wish_of_one_rank_stops_all_at_the_same_step(pools: Pools) -> None:
    def stopped() -> tuple[int, list[str]]:
        world, told = World.here(torch.device("cpu")), list[MonitorEvent]()
        with Monitor(world, ["loss"], 0, "", {}, told.append) as monitor:
            for step in range(1, 10_000):
                if world.rank == 1 and step == 6:
                    monitor.request_stop()
                monitor.record(step, loss=0.5)
                if monitor.stop:
                    break
        return step, [event.status for event in told][-2:]

    by_rank = dict(pools[3].run(stopped))
    (step,) = {step for step, _ in by_rank.values()}
    assert 6 <= step < 10_000 - 1
    assert by_rank[0][1] == ["stopping", "stopped"]


def test_reports_come_twice_a_second_however_long_a_step_takes() -> None:
    now = [0.0]
    for step_s, at_most in ((0.001, 510), (0.1, 6), (3.0, 1)):
        told: list[MonitorEvent] = []
        monitor = Monitor(ALONE, ["loss"], 0, "", {}, told.append, lambda: now[0])
        for step in range(1, 2001):
            now[0] += step_s
            monitor.record(step, loss=1.0)
        monitor.close()
        assert max(len(event.rows) for event in told) <= at_most
        gaps = [b.elapsed_s - a.elapsed_s for a, b in itertools.pairwise(told)]
        assert sum(gap >= min(0.45, step_s) for gap in gaps) >= len(gaps) - 3
        assert sum(len(event.rows) for event in told) == 2000


def test_a_monitor_tells_of_an_error_and_of_nothing_after_its_end() -> None:
    told: list[MonitorEvent] = []
    groups = {"Both": ["a", "b"]}
    monitor = Monitor(ALONE, ["a", "b", "c"], 0, "", groups, told.append)
    monitor.info(epoch=3)
    with pytest.raises(ZeroDivisionError), monitor:
        monitor.record(1, a=1 / 0)
    monitor.close()
    first, last = told
    assert (first.status, last.status, last.rows) == ("running", "failed", [])
    assert (last.groups, last.info) == ({**groups, "c": ["c"]}, {"epoch": "3"})


@pytest.mark.parametrize(
    ("named", "wrong"),
    [
        ("metrics", {"metrics": "loss"}),
        ("metrics", {"metrics": []}),
        ("num_steps", {"num_steps": -1}),
        ("'z'", {"groups": {"More": ["loss", "z"]}}),
    ],
)
def test_arguments_of_a_monitor_that_make_no_sense(named: str, wrong: dict[str, Any]) -> None:
    with raises(OptionsError, named):
        gpupool.monitor(**wrong)


def test_without_a_pool_a_monitor_writes_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with gpupool.monitor(["loss"], num_steps=2, title="Alone") as monitor:
        monitor.record(1, loss=torch.tensor(0.5))
        monitor.record(2, loss=0.25)
    first, *_, last = capsys.readouterr().err.splitlines()  # more where it takes seconds
    assert first.startswith("Alone: step 1 of 2, loss 0.5, ")
    assert last.startswith("Alone: finished, step 2 of 2, loss 0.25, ")


def statistics() -> list[float]:
    model = gpupool.sync_batch_norm(torch.nn.BatchNorm1d(8, dtype=torch.float64))
    for batch in gpupool.shard_batches(samples(2, torch.float64), 2):
        model(batch.inputs)
    return [*model.running_mean.tolist(), *model.running_var.tolist()]


def measured() -> dict[str, float]:
    metrics = gpupool.Metrics(["accuracy", "f1"])
    for batch in gpupool.shard_batches(samples(7, torch.float64), 2, shuffle=False):
        metrics.update(network(torch.float64)(batch.inputs), batch)
    return metrics.compute()


@pytest.mark.parametrize("found", [statistics, measured])
def test_batch_norms_and_metrics_do_not_count_the_stand_in(pools: Pools, found: Any) -> None:
    alone = pools[1].run(found)[0]
    for rank_has in pools[3].run(found).values():
        assert rank_has == pytest.approx(alone, abs=1e-12)
