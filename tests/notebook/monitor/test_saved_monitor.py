"""The picture of a training in the file that each tool leaves, and in what is made of the file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert.exporters import HTMLExporter, LatexExporter, MarkdownExporter

ROOT = Path(__file__).parents[3]
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
CELL = """
from gpupool.notebook.monitor.views import show_training
from tests.notebook.feed import Run
run = Run(num_epochs=3, steps_per_epoch=40)
show_training(run)
run.wait()
"""


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    """A notebook that trains, not yet run."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    new = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})  # type: ignore[no-untyped-call]
    new.cells.append(nbformat.v4.new_code_cell(CELL))  # type: ignore[no-untyped-call]
    path = tmp_path / "training.ipynb"
    nbformat.write(new, path)  # type: ignore[no-untyped-call]
    return path


def by_nbclient(path: Path) -> None:
    read = nbformat.read(path, 4)  # type: ignore[no-untyped-call]
    NotebookClient(read, timeout=60, resources={"metadata": {"path": str(ROOT)}}).execute()
    nbformat.write(read, path)  # type: ignore[no-untyped-call]


def by_command(*words: str) -> Callable[[Path], None]:
    """Runs a tool that writes the notebook in place; `NOTEBOOK` stands for it."""

    def run(path: Path) -> None:
        command = [sys.executable, "-m", *(word.replace("NOTEBOOK", str(path)) for word in words)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=path.parent, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run


TOOLS = {
    "nbconvert": by_command("nbconvert", "--to", "notebook", "--execute", "--inplace", "NOTEBOOK"),
    "papermill": by_command("papermill", "NOTEBOOK", "NOTEBOOK"),
    "nbmake": by_command("pytest", "-p", "no:cacheprovider", "--nbmake", "--overwrite", "NOTEBOOK"),
}


def assert_has_the_picture(path: Path) -> None:
    (cell,) = (c for c in read(path).cells if c.source.strip() == CELL.strip())
    (output,) = cell.outputs
    assert WIDGET_VIEW not in output.data
    assert "Finished: 3 epochs" in output.data["text/plain"]
    assert "Finished: 3 epochs" in output.data["text/html"]
    assert_draws_two_plots(output.data["text/html"])


def read(path: Path) -> Any:
    return nbformat.read(path, 4)  # type: ignore[no-untyped-call]


def assert_draws_two_plots(page: str) -> None:
    (data,) = re.findall('<img[^>]* src="data:image/svg\\+xml;base64,([^"]+)"', page)
    drawn = b64decode(data).decode()
    assert drawn.startswith("<svg ")
    assert drawn.count("<polyline") == 6
    assert "best " in drawn


def test_nbclient_and_what_is_made_of_its_file(notebook: Path) -> None:
    by_nbclient(notebook)
    assert_has_the_picture(notebook)
    executed = read(notebook)
    for exporter in (HTMLExporter, MarkdownExporter):
        page, _ = exporter().from_notebook_node(executed)
        assert "Finished: 3 epochs" in page
        assert "Validation accuracy" in page
        assert_draws_two_plots(page)
    # an image in SVG beside the HTML would have to be converted by a program that may be missing
    paper, _ = LatexExporter().from_notebook_node(executed)
    assert "Finished: 3 epochs" in paper


@pytest.mark.long
@pytest.mark.parametrize("tool", TOOLS)
def test_other_tools_leave_it_too(notebook: Path, tool: str) -> None:
    TOOLS[tool](notebook)
    assert_has_the_picture(notebook)
