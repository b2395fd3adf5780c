"""What ranks are given to do crosses as values of cells do."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpupool import Pool, TrainingError
from gpupool.core.wire.pickles import namespace
from gpupool.notebook.cells.line_view import QuietView
from gpupool.spmd.cell import Notebook, SpmdRun
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on

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
