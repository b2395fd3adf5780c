"""How far something is, as text and HTML, on a real terminal, in a pipe and in a real kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpupool.core.progress import BYTES, Course
from gpupool.notebook.page.progress_view import bar_text
from tests.notebook.kernel import Kernel

FILES = Course("Listing", 1200, 5000, "files", "", 3.0)
PAGES = Course("Listing", 1200, None, "files", "", 3.0)
UNKNOWN = Course("Listing", 0, None, "files", "", 3.0)  # of a store that tells of all at once
LARGE = Course("Sending x", 12 << 20, 5 << 30, BYTES, "", 3.0)
START = Course("Starting the pool", 0, None, "", "importing torch", 3.0)
FIRST = Course("Predicting", 0, 5000, "samples", "", 3.0)


def ended(course: Course) -> Course:
    return replace(course, is_over=True)


@pytest.mark.parametrize(
    ("course", "text"),
    [
        (FILES, "Listing:  24%|##4       | 1200/5000 [00:03<00:09, 400.00 files/s]"),
        (PAGES, "Listing: 1200 files [00:03, 400.00 files/s]"),
        (LARGE, "Sending x:   0%|          | 12.6M/5.37G [00:03<21:17, 4.19MB/s]"),
        (START, "Starting the pool (importing torch) [00:03]"),
        (UNKNOWN, "Listing [00:03]"),
        (FIRST, "Predicting:   0%|          | 0/5000 [00:03<?, ? samples/s]"),
        (ended(FILES), ""),
    ],
)
def test_a_course_in_one_line(course: Course, text: str) -> None:
    assert bar_text(course) == text


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
    assert "Listing  7 files [00:0" in first["data"]["text/html"]
    assert first["data"]["text/plain"].startswith("Listing: 7 files [00:0")
    (output,) = cell.outputs
    assert output["data"] == {"text/html": '<div class="gpupool-progress"></div>', "text/plain": ""}
