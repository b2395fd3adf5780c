"""predict: every sample once, in order, whatever the sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import gpupool
from gpupool import OptionsError, Pool, SpmdError, TrainingError, TrainingOptions
from gpupool.pool import session
from tests.engine.metrics.tables import Table
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import network, samples


@pytest.mark.parametrize("num_samples", [1, 2, 7, 101])
def test_outputs_come_in_the_order_of_the_samples(pool2: Pool, num_samples: int) -> None:
    data, model = samples(num_samples), network()
    outputs = gpupool.predict(model, data, batch_size=10)
    with torch.no_grad():
        expected = model(data.tensors[0])
    assert outputs.shape == (num_samples, 3)
    assert torch.allclose(outputs, expected, atol=1e-6)


def test_several_outputs_come_in_dicts_and_lists(pools: Pools) -> None:
    rows = {"a": torch.randn(7, 2), "b": torch.randn(7, 3, 4)}
    data = TensorDataset(torch.arange(7).double(), torch.zeros(7))
    for pool in pools.values():
        found = gpupool.predict(Table(rows), data, batch_size=3, pool=pool)
        assert found.keys() == rows.keys()
        assert all(torch.equal(found[name], rows[name]) for name in rows)


def test_less_precision_is_asked_for_and_seen(pools: Pools) -> None:
    data, model = samples(40), network()
    with torch.no_grad():
        exact = model(data.tensors[0])
    outputs = gpupool.predict(model, data, precision="bf16", pool=pools[2])
    assert outputs.dtype == torch.float32
    assert 1e-5 < (outputs - exact).abs().max() < 0.05
    with raises(OptionsError, "precision"):
        gpupool.predict(model, data, precision="half", pool=pools[2])


def test_bad_input_is_refused(pool2: Pool) -> None:
    with raises(TrainingError, "model"):
        gpupool.predict("resnet18", samples(4))  # type: ignore[arg-type]
    with raises(TrainingError, "dataset"):
        gpupool.predict(network(), [])
    with raises(TrainingError, "pool"):
        gpupool.evaluate(network(), samples(4), pool=2)  # type: ignore[arg-type]


@pytest.mark.long
def test_train_starts_a_pool_if_none_runs_and_says_so_in_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    session.stop()
    try:
        result = gpupool.train(network(), samples(8), options=TrainingOptions(epochs=1))
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("gpupool: no pool was running; started ")
        assert result.stopped_by == "epochs"
        assert session.current_pool().status().state == "idle"
    finally:
        session.stop()


class TimeFirst(nn.Module):
    """Gives (time, samples, ...)."""

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": inputs.transpose(0, 1)}


def test_outputs_whose_rows_are_no_samples_are_refused(pools: Pools) -> None:
    for pool in pools.values():
        with raises(SpmdError, "(7, ", ename="TrainingError"):
            gpupool.predict(TimeFirst(), torch.randn(12, 7, 4), batch_size=12, pool=pool)
