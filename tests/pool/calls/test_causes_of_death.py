"""What is told when memory runs out or a GPU's context is lost. Real engines."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest

import gpupool
from gpupool import Pool, SpmdError
from gpupool.core.machine.gpus import discover
from gpupool.core.wire.calls import DebugCommand, RunSource
from gpupool.pool import session
from tests.notebook.kernel import plain
from tests.support.processes import until

Fails = Callable[..., SpmdError]


@pytest.fixture
def fails(pool2: Pool) -> Fails:
    """Runs a cell on both ranks and gives its error."""

    def fails(source: str, pool: Pool = pool2) -> SpmdError:
        execution = pool.begin(
            source, ranks=tuple(r.rank for r in pool.ranks), on_output=lambda *_: None,
            cell_number=3, timeout_s=60,
        )  # fmt: skip
        with pytest.raises(SpmdError) as caught:
            execution.result()
        return caught.value

    return fails


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


def test_what_has_failed_keeps_no_memory_and_the_debugger_says_so(
    pool2: Pool, fails: Fails
) -> None:
    pool2.run(HELD)
    fails("Net().forward()")
    assert dict(pool2.run(LEFT)) == {0: [], 1: []}
    said = pool2._all_ranks.engines.call(0, DebugCommand(None)).result(10)
    assert said.value.text.startswith("There is nothing to look at: ")
    fails("1 / 0")
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


# ---- a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_out_of_gpu_memory_keeps_the_rank_and_what_it_held(fails: Fails) -> None:
    session.stop()
    with gpupool.start(n=1, gpus=discover().usable[0].uuid) as pool:
        source = """
            large = torch.empty(2**28, device=device)  # 1 GiB
            def step():
                inner = torch.empty(2**27, device=device)
                return torch.empty(2**50, device=device)
            step()
        """
        error = fails(textwrap.dedent(source), pool)
        assert error.first.ename == "OutOfMemoryError"
        assert pool.run("torch.cuda.memory_allocated() < 2**30 + 2**26")[0]
        assert pool.run("torch.cuda.memory_reserved() < 2**30 + 2**27")[0]


@pytest.mark.gpu
def test_a_device_side_assert_is_a_lost_context() -> None:
    session.stop()
    with gpupool.start(n=1, gpus=discover().usable[0].uuid) as pool:
        wrong = "torch.arange(4, device=device)[torch.tensor([9], device=device)].cpu()"
        reply = pool._all_ranks.engines.call(0, RunSource(wrong, 3)).result(60)
        assert reply.context_lost
        assert reply.raised is not None
        assert "The GPU context of this rank is lost" in reply.raised.error.hint
        until(lambda: pool.status().state != "busy", 20.0)
