"""How far something is, as text and HTML, on a real terminal, in a pipe and in a real kernel."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from dataclasses import replace

import nbformat
import pytest
from nbclient import NotebookClient

from gpupool.core.progress import BYTES, Course
from gpupool.core.terminal import FRESH_LINE
from gpupool.notebook.page.progress_view import bar_html, bar_text
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
        (FILES, "Listing:  24%|##4       | 1,200 of 5,000 files [00:03<00:09, 400 files/s]"),
        (PAGES, "Listing: 1,200 files [00:03, 400 files/s]"),
        (LARGE, "Sending x:   0%|          | 12.6MB of 5.37GB [00:03<21:17, 4.19MB/s]"),
        (START, "Starting the pool (importing torch) [00:03]"),
        (UNKNOWN, "Listing [00:03]"),
        (FIRST, "Predicting:   0%|          | 0 of 5,000 samples [00:03<?, ? samples/s]"),
        (ended(FILES), ""),
    ],
)
def test_a_course_in_one_line(course: Course, text: str) -> None:
    assert bar_text(course, blocks=False) == text


def test_html_has_a_real_bar_with_a_name_and_nothing_is_left_of_it() -> None:
    html = bar_html(FILES)
    assert '<progress value="0.240" max="1" aria-label="Listing"' in html
    assert "1,200 of 5,000 files [00:03&lt;00:09, 400 files/s]" in html
    assert "<progress" not in bar_html(PAGES)  # no end is known: it would only move
    assert "Listing  1,200 files [00:03, 400 files/s]" in bar_html(PAGES)
    assert "importing torch)  [00:03]" in bar_html(START)
    assert bar_html(ended(FILES)) == '<div class="gpupool-progress"></div>'
    assert "&lt;b&gt;" in bar_html(Course("Sending <b>", 1, 2, "", "", 1.0))


SCRIPT = """
import sys, time
from gpupool.core.progress import progress
from gpupool.core.terminal import _lines

def drawn(number):
    while len(_lines) < number:
        time.sleep(0.01)

mode = sys.argv[1]
wanted = mode != "quiet"
try:
    with progress("Outer") as bar:
        bar.tell("first")
        if wanted:
            drawn(1)
        with progress("Inner", 5, "files") as inner:
            inner.update(2)
            if wanted:
                drawn(2)
                print("a line", end=" ", file=sys.stderr)
                time.sleep(0.3)  # what is drawn five times a second waits for its end
                print("between", file=sys.stderr)
            else:
                time.sleep(1.3)
        if mode == "error":
            raise ValueError("wrong")
except ValueError as error:
    print(type(error).__name__, file=sys.stderr)
print("end", file=sys.stderr)
"""


class Pty:
    """A script whose stderr is a terminal; a context manager."""

    def __init__(self, mode: str, **variables: str) -> None:
        self.reader, terminal = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, mode],
            stdout=subprocess.PIPE,
            stderr=terminal,
            text=True,
            env={**os.environ, "TERM": "xterm-256color", **variables},
        )
        os.close(terminal)

    def __enter__(self) -> Pty:
        return self

    def __exit__(self, *details: object) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self.reader)

    def shown(self) -> str:
        """Everything until its end."""
        parts = []
        while True:
            try:
                part = os.read(self.reader, 4096)
            except OSError:  # it has ended
                break
            if not part:
                break
            parts.append(part)
        return b"".join(parts).decode()


@pytest.mark.long
@pytest.mark.parametrize("mode", ["good", "error"])
def test_a_terminal_is_left_clean_whatever_ends_it(mode: str) -> None:
    with Pty(mode) as script:
        shown = script.shown()
    pieces = shown.split(FRESH_LINE)
    assert pieces[0] == ""
    assert any(piece.startswith("Outer (first) [00:0") for piece in pieces)
    assert any(piece.startswith("Inner:  40%|") for piece in pieces)
    said = {"good": "", "error": "ValueError\r\n"}[mode]
    between = "a line between\r\n"
    assert any(piece.startswith(between) for piece in pieces)
    assert pieces[-1].removeprefix(between) == f"{said}end\r\n"  # where nothing is drawn


@pytest.mark.parametrize("kind", ["dumb", "pipe"])
def test_nothing_moves_where_nothing_can(kind: str) -> None:
    if kind == "dumb":
        with Pty("quiet", TERM="dumb") as script:
            assert script.shown() == "end\r\n"
    else:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, "quiet"], capture_output=True, text=True, timeout=60
        )
        assert (done.stdout, done.stderr) == ("", "end\n")


WORK = """
import time
from gpupool.core.progress import progress
def work(end_after):
    with progress("Listing", unit="files") as bar:
        bar.update(7)
        while bar._drawing is None:
            time.sleep(0.01)
        bar.update(12)
        if end_after:
            time.sleep(60)
"""


@pytest.fixture(scope="module")
def kernel(clean_kernel: Kernel) -> Kernel:
    assert clean_kernel.run(WORK).status == "ok"
    return clean_kernel


def test_a_notebook_shows_a_bar_and_nothing_of_it_stays(kernel: Kernel) -> None:
    cell = kernel.run("work(False)")
    (first, *_) = [c for _, kind, c in cell.messages if kind == "display_data"]
    assert "Listing  7 files [00:0" in first["data"]["text/html"]
    assert first["data"]["text/plain"].startswith("Listing: 7 files [00:0")
    (output,) = cell.outputs
    assert output["data"] == {"text/html": '<div class="gpupool-progress"></div>', "text/plain": ""}


@pytest.mark.long
def test_the_log_of_a_program_that_executes_a_file_has_a_line_for_each_stage() -> None:
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(f"{WORK}\nwork(False)\n1")]
    )
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    outputs = notebook.cells[0].outputs
    assert [one.text for one in outputs if one.output_type == "stream"] == ["Listing\n"]
    _, value = [one for one in outputs if one.output_type != "stream"]
    assert value.data == {"text/plain": "1"}
