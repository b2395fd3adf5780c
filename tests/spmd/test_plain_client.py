"""ipyparallel's own client on a pool: the page about it, cell by cell, and calls that hang."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import ipyparallel
import pytest

from gpupool import Pool, SpmdError
from tests.notebook.kernel import Kernel
from tests.support.processes import until
from tests.support.raising import raises

PAGE = (Path(__file__).parents[2] / "docs" / "ipyparallel.md").read_text()
CELLS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SUM = "t = torch.ones(1); dist.all_reduce(t); t.item()"


def reduce() -> float:
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as kernel:
        kernel.run("%load_ext gpupool\n%gpupool start --cpu -n 2")
        kernel.run("import gpupool\npool = gpupool.current_pool()")
        yield kernel


@pytest.mark.long
def test_the_cells_of_the_page(kernel: Kernel) -> None:
    has_dask = importlib.util.find_spec("distributed") is not None
    shown = ["[0, 1, 4, 9]", "", "[0] 0\n[1] 10", "42", ""]
    assert len(CELLS) == len(shown)
    for cell, text in list(zip(CELLS, shown, strict=True))[: None if has_dask else 3]:
        done = kernel.run(cell)
        assert done.errors == [], done.error_text
        assert done.text == text
    assert kernel.run(f"%%spmd\n{SUM}").text == "[0, 1] 2.0"
    if not has_dask:
        pytest.skip("dask's distributed is not installed: its two cells were left out")


@pytest.mark.long
def test_a_collective_of_one_rank_hangs_that_call_and_not_the_pool(pool2: Pool) -> None:
    pool2.run("kept = rank")
    assert pool2.client[:].apply_sync(reduce) == [2.0, 2.0]
    for rank in (0, 1):
        alone = pool2.client[rank].apply_async(reduce)
        until(lambda: pool2._all_ranks.engines.of_others([0, 1]) == [rank], 20.0, "the call")  # noqa: B023
        assert dict(pool2.run(f"{SUM}, kept")) == {0: (2.0, 0), 1: (2.0, 1)}
        with pytest.raises(ipyparallel.RemoteError):
            alone.get(20)


def test_a_cell_waits_for_a_plain_call_on_its_ranks_alone(pool2: Pool) -> None:
    import time

    said: list[str | None] = []
    sleep = pool2.client[1].apply_async(time.sleep, 600)
    until(lambda: pool2._all_ranks.engines.of_others([0, 1]) == [1], 20.0, "the call")
    assert dict(pool2.run("rank", ranks=0)) == {0: 0}
    cell = pool2.begin("rank", ranks=[0, 1], on_output=lambda *_: None, on_notice=said.append)
    until(lambda: "another client of ipyparallel runs (rank 1)" in str(said), 20.0, "the word")
    cell.interrupt()
    shown = "`pool.client.send_signal('SIGINT')`"
    with raises(SpmdError, "", shown=shown, ename="KeyboardInterrupt"):
        cell.result()
    assert not sleep.ready()
    cell = pool2.begin(SUM, ranks=[0, 1], on_output=lambda *_: None)
    pool2.client.send_signal("SIGINT", targets=[1], block=True)
    assert {rank: reply.text for rank, reply in cell.result().items()} == {0: "2.0", 1: "2.0"}
    with pytest.raises(ipyparallel.RemoteError, match="KeyboardInterrupt"):
        sleep.get(20)


def test_a_pool_that_has_stopped_has_no_client(kernel: Kernel) -> None:
    assert kernel.run("pool.client.ids").text == "[0, 1]"
    done = kernel.run("%gpupool stop\npool.client")
    assert "PoolError: this pool was stopped" in done.error_text
