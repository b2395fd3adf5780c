"""How cells look while they run and at their end: a real kernel and three real ranks."""

from __future__ import annotations

import re

import pytest

from tests.notebook.kernel import Kernel, draws

HANG = """%%spmd
import time
if rank == 0:
    dist.all_reduce(torch.ones(1))
elif rank == 1:
    time.sleep(600)"""
TAG = re.compile(r"<[^>]+>")
# Imports in all the ways that cells make them; `textwrap` is the notebook's own.


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
