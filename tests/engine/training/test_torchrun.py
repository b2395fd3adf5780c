"""The loop under plain torchrun gives what `train()` gives on a pool, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpupool import TrainingRun
from tests.engine.training import twin
from tests.support.pools import Pools

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]


def test_losses_and_weights_are_those_of_train_although_it_went_on_from_a_checkpoint(
    pools: Pools, tmp_path: Path
) -> None:
    results_path = tmp_path / "results.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.engine.training.twin", str(results_path), str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=150)
    job = (pools[2], twin.network(), twin.data(), "cross_entropy", twin.RICH, None)
    result = TrainingRun(*job).result()
    expected = twin.outcome(result.history.loss, result.model)
    assert json.loads(results_path.read_text()) == expected
