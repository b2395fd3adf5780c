"""What a device had not computed when collectives were aborted is in no checkpoint, and is said.

`python -m gpupool check` shows it on GPUs; here a device says that it lags (`later.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gpupool import Pool, SpmdError, TrainingOptions, TrainingRun
from gpupool.engine.training.checkpoints import Checkpoints, step_of
from tests.engine.group import later

BATCH, EVERY, FAILS_AT = 6, 4, 10
NOT_WAITING: dict[str, Any] = {"ranks": (0, 1), "on_output": lambda *_: None}


class Points(Dataset[Any]):
    """Each rank reads half of a batch; rank 1 fails in step `FAILS_AT`."""

    def __init__(self) -> None:
        self.num_read = 0

    def __len__(self) -> int:
        return 20 * BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.num_read += 1
        if os.environ["RANK"] == "1" and self.num_read >= FAILS_AT * BATCH // 2:
            raise OSError("the disk is gone")
        return torch.full((8,), index / 100), torch.ones(3)


@pytest.fixture
def behind(pool2: Pool) -> Iterator[Pool]:
    """Two ranks whose device lags."""
    pool2.run(later.install)
    pool2.run("from gpupool.data import device as devices\nlag = devices.of('cpu')")
    yield pool2
    pool2.run(later.remove)


def test_no_checkpoint_is_made_of_steps_that_were_not_complete(
    behind: Pool, tmp_path: Path
) -> None:
    options = TrainingOptions(
        epochs=1, batch_size=BATCH, lr=0.1, checkpoint=str(tmp_path), checkpoint_every=EVERY
    )
    run = TrainingRun(behind, nn.Linear(8, 3), Points(), "mse", options, None)
    with pytest.raises(SpmdError) as caught:
        run.result()
    assert caught.value.first.ename == "OSError"
    assert any("had completed 0 of" in one.message for one in run.history.warnings)
    steps = [step_of(name) for name in Checkpoints(str(tmp_path)).names()]
    assert all(step % EVERY == 0 for step in steps)  # none was made when it failed
    assert not steps or f"The checkpoint after step {max(steps)} is" in caught.value.first.hint


def test_after_a_failed_loop_its_tensors_are_said_to_be_unfinished(behind: Pool) -> None:
    with pytest.raises(SpmdError) as caught:
        behind.run("if rank == 1: raise ValueError('no more data')\ndist.all_reduce(torch.ones(1))")
    assert caught.value.first.ename == "ValueError"
    assert "may hold unfinished numbers on every rank" in caught.value.first.hint


LATER = "import threading\nlag.done.clear()\nthreading.Timer(0.5, lag.done.set).start()"


def test_a_cell_ends_when_its_device_does_and_has_its_error(behind: Pool) -> None:
    behind.run(LATER)
    found = behind.begin("lag.done.is_set()", **NOT_WAITING).result()
    assert [reply.text for reply in found.values()] == ["True", "True"]
    with pytest.raises(SpmdError) as caught:
        behind.run(f"lag.failure = RuntimeError('device-side assert')\n{LATER}")
    assert caught.value.first.evalue == "device-side assert"
    assert dict(behind.run("rank")) == {0: 0, 1: 1}
