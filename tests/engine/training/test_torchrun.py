"""The loop under plain torchrun gives what `train()` gives on a pool, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpupool import Pool, TrainingOptions, TrainingRun
from tests.engine.training import twin
from tests.support.pools import Pools

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the trainings of `twin.py` come to on two ranks."""
    folder = tmp_path_factory.mktemp("torchrun")
    results = folder / "results.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.engine.training.twin", str(results), str(folder / "checkpoints")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=150)
    return dict(json.loads(results.read_text()))


def on_pool(pool: Pool, options: TrainingOptions) -> dict[str, Any]:
    run = TrainingRun(pool, twin.network(), twin.data(), "cross_entropy", options, None)
    result = run.result()
    return twin.outcome(result.history.loss, result.model)


def test_losses_and_weights_are_those_of_train(pools: Pools, results: dict[str, Any]) -> None:
    assert results["plain"] == on_pool(pools[2], twin.PLAIN)


def test_so_they_are_with_all_that_makes_up_a_step(pools: Pools, results: dict[str, Any]) -> None:
    assert results["rich"] == on_pool(pools[2], twin.RICH)


def test_a_training_that_went_on_from_a_checkpoint_is_the_same(results: dict[str, Any]) -> None:
    assert len(results["begun"]["losses"]) == 6
    assert results["begun"]["losses"] == results["rich"]["losses"][:6]
    assert results["resumed"] == results["rich"]
