"""How cells look while they run and at their end: a real kernel and three real ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.notebook.kernel import Cell, Kernel, draws
from tests.support.waits import until_there

HANG = """%%spmd
import time
if rank == 0:
    dist.all_reduce(torch.ones(1))
elif rank == 1:
    time.sleep(600)"""
TAG = re.compile(r"<[^>]+>")
# Imports in all the ways that cells make them; `textwrap` is the notebook's own.
IMPORTS = """%%spmd
import time, xml.dom.minidom
import numpy as np
from pathlib import Path as P
if world_size > 1:
    from json import dumps
try:
    import ujson_is_not_there as fast
except ImportError:
    import json as fast"""
USES = """%%spmd
(time.monotonic() > 0, xml.dom.minidom.Node.TEXT_NODE, np.arange(3).sum().item(), P("a").name,
 dumps([1]), fast.loads("2"), textwrap.indent("a", "b"))"""

LOSE = """
pool = gpupool.current_pool()
old = pool.status().pids[1]
os.kill(old, 9)
while pool.status().pids.get(1) in (old, None): time.sleep(0.01)"""


@pytest.fixture(scope="module")
def kernel(clean_kernel: Kernel) -> Kernel:
    """A kernel with a pool of three ranks that reports hangs early."""
    start = "%load_ext gpupool\n%gpupool start -n 3 --cpu --hang-after 2s"
    assert clean_kernel.run(f"{start}\nimport os, textwrap, time, gpupool").status == "ok"
    return clean_kernel


def rows(html: str) -> list[list[str]]:
    """The texts of the first table."""
    body = html.partition("<tbody>")[2].partition("</tbody>")[0]
    cells = [row.split("</td>")[:-1] for row in body.split("</tr>")[:-1]]
    return [[TAG.sub("", cell) for cell in row] for row in cells]


def last_drawn(cell: Cell) -> str:
    return str(cell.drawn[-1]["text/plain"]) if cell.drawn else ""


@pytest.mark.long
def test_a_hang_is_a_table_with_a_button_below_a_dot_for_each_rank(kernel: Kernel) -> None:
    cell = kernel.run(HANG, meanwhile=[(draws("Hang:"), kernel.press_stop)])
    html = next(data["text/html"] for data in cell.drawn if "Hang:" in data["text/html"])
    number = next(c["execution_count"] for _, kind, c in cell.messages if kind == "execute_input")
    assert rows(html) == [
        ["0", "in all_reduce", f"Cell In[{number}], line 4"],
        ["1", "running", f"Cell In[{number}], line 6"],
        ["2", "has already finished the cell", ""],
    ]
    assert 'aria-label="[0] in all_reduce; [1] running; [2] done"' in html
    dots = re.findall(r'title="(rank \d: [^"]+)"[^>]*>(.)<', html)
    assert dots == [("rank 0: in all_reduce", "◐"), ("rank 1: running", "●"), ("rank 2: done", "✓")]
    assert html.count('<span class="gpupool-interrupt-') == 1
    # Nothing of it stays.
    assert "gpupool-interrupt" not in cell.html
    assert "Hang:" not in cell.html
    assert "2 interrupted" in cell.html


def test_ranks_that_say_much_have_a_row_each(kernel: Kernel, tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    says = "for i in range(12):\n    print('rank', rank, 'in step', i)"
    wanted = "\n".join(f"[{rank}] rank {rank} in step 11" for rank in range(3))
    cell = kernel.run(
        f"%%spmd\n{says}\n{until_there(enough)}",
        meanwhile=[(lambda so_far: last_drawn(so_far) == wanted, enough.touch)],
    )
    assert cell.status == "ok"
    assert cell.text.count("in step") == 36


def test_imports_are_made_again_on_a_rank_that_is_new(kernel: Kernel) -> None:
    assert kernel.run(IMPORTS).status == "ok"
    before = kernel.run(USES)
    assert kernel.run(LOSE).status == "ok"
    after = kernel.run(USES)
    assert after.status == "ok", after.error_text
    said = "(True, 3, 3, 'a', '[1]', 2, 'ba')"
    assert before.text == after.text.splitlines()[-1] == f"[0-2] {said}"
