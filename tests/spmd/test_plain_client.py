"""ipyparallel's own client on a pool: the page about it, cell by cell."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import ipyparallel
import pytest

from gpupool import Pool
from tests.notebook.kernel import Kernel

PAGE = (Path(__file__).parents[2] / "docs" / "ipyparallel.md").read_text()
CELLS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SUM = "t = torch.ones(1); dist.all_reduce(t); t.item()"


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
    assert "PoolError: this pool was stopped" in kernel.run("%gpupool stop\npool.client").error_text
    if not has_dask:
        pytest.skip("dask's distributed is not installed: its two cells were left out")


def test_a_cell_comes_after_what_a_plain_client_has_asked_of_its_ranks(pool2: Pool) -> None:
    import time

    sleep = pool2.client[1].apply_async(time.sleep, 600)
    assert dict(pool2.run("rank", ranks=0)) == {0: 0}
    cell = pool2.begin(SUM, ranks=[0, 1], on_output=lambda *_: None)
    assert not cell.wait(0.5)
    pool2.client.send_signal("SIGINT", targets=[1], block=True)
    assert {rank: reply.text for rank, reply in cell.result().items()} == {0: "2.0", 1: "2.0"}
    with pytest.raises(ipyparallel.RemoteError, match="KeyboardInterrupt"):
        sleep.get(20)
