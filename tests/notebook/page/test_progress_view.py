"""How far something is, as text and HTML, on a real terminal, in a pipe and in a real kernel."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpupool.core import progress as core_progress
from gpupool.core.progress import BYTES, Progress
from gpupool.notebook.page.progress_view import bar_text
from tests.notebook.kernel import Kernel


@pytest.mark.parametrize(
    ("what", "done", "total", "unit", "text"),
    [
        (
            *("Listing", 1200, 5000, "files"),
            "Listing:  24%|##4       | 1200/5000 [00:03<00:09, 400.00 files/s]",
        ),
        ("Listing", 1200, None, "files", "Listing: 1200 files [00:03, 400.00 files/s]"),
        (
            *("Sending x", 12 << 20, 5 << 30, BYTES),
            "Sending x:   0%|          | 12.6M/5.37G [00:03<21:17, 4.19MB/s]",
        ),
        ("Listing", 0, None, "files", "Listing [00:03]"),  # of a store that tells of all at once
    ],
)
def test_how_far_it_is_in_one_line(
    monkeypatch: pytest.MonkeyPatch, what: str, done: int, total: int | None, unit: str, text: str
) -> None:
    monkeypatch.setattr(core_progress, "time", SimpleNamespace(monotonic=lambda: 0.0))
    bar = Progress(what, total, unit, elapsed_s=3.0)
    bar.update(done)
    assert bar_text(bar) == text
    bar.tell("a part")
    assert bar_text(bar) == text.replace(what, f"{what} (a part)")
    bar.close()
    assert bar_text(bar) == ""


WORK = """
import time
from gpupool.core.progress import progress
with progress("Listing", unit="files") as bar:
    bar.update(7)
    while bar._drawing is None:
        time.sleep(0.01)
    bar.update(12)
"""


def test_a_notebook_shows_a_bar_and_nothing_of_it_stays(clean_kernel: Kernel) -> None:
    cell = clean_kernel.run(WORK)
    (first, *_) = [c for _, kind, c in cell.messages if kind == "display_data"]
    assert "Listing: 7 files [00:0" in first["data"]["text/html"]
    assert first["data"]["text/plain"].startswith("Listing: 7 files [00:0")
    (output,) = cell.outputs
    assert output["data"] == {"text/html": '<div class="gpupool-progress"></div>', "text/plain": ""}
