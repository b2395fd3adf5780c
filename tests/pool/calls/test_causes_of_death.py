"""What is told when memory runs out, a GPU's context is lost or a process ends. Real engines."""

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
from tests.support.processes import folder_of, until

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


# ---- deaths ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("death", "words"),
    [
        ("import ctypes; ctypes.string_at(0)", ["SIGSEGV", "Cell, line 4 in <module>"]),
        ("os.write(2, b'last ' b'words\\n'); logged(); os._exit(3)", ["status 3", "last words"]),
    ],
    ids=["SIGSEGV", "exit"],
)
def test_a_death_in_a_running_cell_is_told_with_its_cause_and_the_end_of_the_log(
    pool2: Pool, fails: Fails, death: str, words: list[str]
) -> None:
    log = str(folder_of(pool2) / "rank1.log")
    pool2.run(
        "import time\ndef logged():\n"  # what goes to descriptor 2 is in the log a moment later
        f"    while 'last words' not in open({log!r}).read(): time.sleep(0.01)"
    )
    sleep = "    time.sleep(0.1)\n"
    source = f"import os, time\nif rank == 1:\n{sleep}    {death}\ndist.barrier()"
    error = fails(source)
    assert error.first.rank == 1
    assert error.first.ename == "EngineDiedError"
    for word in words:
        assert word in error.first.evalue
    assert error.errors[0].freed
    pool2.restart([1])


def test_a_rank_that_has_lost_its_gpu_context_is_replaced_before_the_next_cell_begins() -> None:
    session.stop()
    with gpupool.start(n=1, device="cpu") as pool:
        pool.run(
            "from gpupool.engine.cells import errors\nerrors.is_context_lost = lambda *errors: True"
        )
        before = pool.status().pids[0]
        with pytest.raises(SpmdError, match="ZeroDivisionError"):
            pool.run("1 / 0")
        assert pool.run("import os; os.getpid()")[0] == pool.status().pids[0] != before


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
