"""What becomes of memory that ran out, and of a lost GPU context. On GPUs: gpupool/check."""

from __future__ import annotations

import pytest

from gpupool import Pool, SpmdError
from gpupool.core.wire.calls import DebugCommand
from tests.notebook.kernel import plain


def fails(pool: Pool, source: str) -> None:
    """Run a cell that fails on both ranks."""
    ranks, unheard = (0, 1), lambda *_: None
    execution = pool.begin(source, ranks=ranks, on_output=unheard, cell_number=3, timeout_s=60)
    with pytest.raises(SpmdError):
        execution.result()


HELD = """
import gc
class Net:
    def forward(self):
        activations = torch.ones(3, 2**20)                 # 12 MiB
        raise MemoryError
"""
LEFT = (
    "[t.shape[0] for t in gc.get_objects() if type(t) is torch.Tensor and t.numel() == 3 * 2**20]"
)


def test_what_has_failed_keeps_no_memory_and_the_debugger_says_so(pool2: Pool) -> None:
    pool2.run(HELD)
    fails(pool2, "Net().forward()")
    assert dict(pool2.run(LEFT)) == {0: [], 1: []}
    said = pool2._all_ranks.engines.call(0, DebugCommand(None)).result(10)
    assert said.value.text.startswith("There is nothing to look at: ")
    fails(pool2, "1 / 0")
    said = pool2._all_ranks.engines.call(0, DebugCommand(None)).result(10)
    assert "1 / 0" in plain(said.value.text)


def test_a_rank_that_has_lost_its_gpu_context_is_replaced_before_the_next_cell_begins(
    pool2: Pool,
) -> None:
    lost = "from gpupool.engine.cells import errors\nerrors.is_context_lost = lambda *errors: True"
    pool2.run(lost, ranks=0)
    before = pool2.status().pids
    with pytest.raises(SpmdError, match="ZeroDivisionError"):
        pool2.run("1 / 0")
    now = dict(pool2.run("import os; os.getpid()"))
    assert now == dict(pool2.status().pids)
    assert [now[rank] == before[rank] for rank in (0, 1)] == [False, True]
