"""What starts ranks by itself, in a cell: one sentence at once, and no process is left."""

from __future__ import annotations

import textwrap
import time

import psutil
import pytest

from gpupool import Pool, SpmdError
from tests.support.raising import frames_of_ours

SUM = "t = torch.ones(1)\ndist.all_reduce(t)\nt.item()"
WORK = "def work(*_):\n    return dist.get_world_size()\n"
LAUNCHERS = {
    "fork": (
        "import torch.multiprocessing as mp\n"
        "mp.start_processes(work, nprocs=2, start_method='fork')"
    ),
    "elastic": (
        "from torch.distributed.launcher.api import LaunchConfig, elastic_launch\n"
        "config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2,\n"
        "                      rdzv_endpoint='127.0.0.1:29500', rdzv_backend='static')\n"
        "elastic_launch(config, work)()"
    ),
    "accelerate": (
        "from accelerate import notebook_launcher\nnotebook_launcher(work, num_processes=2)"
    ),
    "pytorch_lightning": """
        import pytorch_lightning as pl
        from torch.utils.data import DataLoader, TensorDataset
        class Work(pl.LightningModule):
            def __init__(self):
                super().__init__(); self.out = torch.nn.Linear(8, 3)
            def training_step(self, batch, number): return self.out(batch[0]).mean()
            def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)
        off = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False,
                   enable_model_summary=False, max_steps=1)
        trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp_notebook", **off)
        trainer.fit(Work(), DataLoader(TensorDataset(torch.ones(8, 8)), 4))
    """,
}
LIBRARIES = ("accelerate", "pytorch_lightning")


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in LIBRARIES else [])
        for name in LAUNCHERS
    ],
)
def test_a_launcher_says_what_to_call_instead(pool2: Pool, launcher: str) -> None:
    if launcher in LIBRARIES:
        pytest.importorskip(launcher, reason=f"{launcher} is not installed")
        pool2.run(f"import {launcher}")  # which may take longer than what it does
    port = "import os; os.environ.get('MASTER_PORT')"
    before, port_before, began = children(), pool2.run(port)[0], time.monotonic()
    with pytest.raises(SpmdError) as caught:
        pool2.run(WORK + textwrap.dedent(LAUNCHERS[launcher]), timeout_s=60)
    assert time.monotonic() - began < 10
    name = "the function" if launcher == "pytorch_lightning" else "work"
    assert f"call {name}(rank, ...) instead" in str(caught.value)
    assert not frames_of_ours(caught.value.first.traceback)
    assert dict(pool2.run(SUM)) == {0: 2.0, 1: 2.0}
    assert (children(), pool2.run(port)[0]) == (before, port_before)
