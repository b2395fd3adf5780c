"""What ranks are given to do crosses as values of cells do: tensors come to the rank's device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpupool import Pool, TrainingError
from gpupool.core.jobs import InferenceJob, JobPacker
from gpupool.core.options.training_options import TrainingOptions
from gpupool.core.wire.calls import Predict
from gpupool.core.wire.pickles import namespace, to_wire
from gpupool.core.wire.values import Job
from gpupool.notebook.cells.views import QuietView
from gpupool.pool.calls.execution import Execution
from gpupool.pool.calls.output import OutputRecorder
from gpupool.spmd.cell import Notebook, SpmdRun
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on


class OnGpus(JobPacker):
    """As if all tensors had been on a GPU of the notebook: they are marked so."""

    def _reduce_storage(self, torch: Any, obj: Any) -> Any:
        make, (data, _) = super()._reduce_storage(torch, obj)
        return make, (data, True)


def test_tensors_of_gpus_come_to_the_device_of_the_rank(pool2: Pool) -> None:
    model, data = network(), samples(7)
    packer = OnGpus()
    packer.dump(InferenceJob(model, data, TrainingOptions(batch_size=4)))
    job, result = to_wire(packer.stream(), packer.buffers, None), pool2.engines.new_file("out")
    ranks = pool2.training_ranks  # which are on the CPU
    call = Predict(Job("one", job, [], {}), result.name)
    Execution(pool2, dict.fromkeys(ranks, call), OutputRecorder(ranks, frozenset())).result()
    parts = [torch.load(f"{result}.{rank}", weights_only=True) for rank in ranks]
    outputs = torch.cat([share for batch in zip(*parts, strict=True) for share in batch])
    assert torch.allclose(outputs, model(data.tensors[0]), atol=1e-6)


OF_MODULE = """
import threading
class Log:
    def __init__(self): self._lock, self.lines = threading.Lock(), []
    def info(self, text, *words): print(text.format(*words))
log = Log()
"""


def test_what_an_import_gives_travels_by_its_name(
    pool2: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log_of_test.py").write_text(OF_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    space = namespace()
    before = dict(space)
    try:
        exec("from log_of_test import log\ndef noisy(info): log.info('step {}', info.step)", space)
        notebook = Notebook(space, str)
        source, view = "log.info('rank {}', rank)", QuietView()
        result = SpmdRun(pool2, source, (0, 1), view, notebook=notebook).result()
        assert [result.text(rank) for rank in (0, 1)] == ["rank 0\n", "rank 1\n"]
        settings = {"callbacks": space["noisy"], "epochs": 1, "batch_size": 8}
        found = train_on(pool2, network(), samples(8), **settings)
        assert "step 1" in found.text(0)
        exec("import threading; log = threading.Lock()", space)  # no module has this one
        with raises(TrainingError, "options", "callbacks[0]", " log"):
            train_on(pool2, network(), samples(8), **settings)
    finally:
        space.clear()
        space.update(before)
