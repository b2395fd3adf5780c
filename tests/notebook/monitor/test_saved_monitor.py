"""The picture of a training in the file that each tool leaves, and in what is made of the file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

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


def by_command(*words: str) -> Callable[[Path], str]:
    """Runs a tool that writes the notebook in place, `NOTEBOOK` stands for it; gives its log."""

    def run(path: Path) -> str:
        command = [sys.executable, "-m", *(word.replace("NOTEBOOK", str(path)) for word in words)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=path.parent, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stderr

    return run


def assert_has_the_picture(path: Path) -> None:
    (cell,) = (c for c in read(path).cells if c.source.strip() == CELL.strip())
    # Nobody saw the widget: its lines are for a log.
    log = "".join(one.text for one in cell.outputs if one.output_type == "stream")
    assert "finished  epoch 3/3  step 120/120" in log
    (output,) = [one for one in cell.outputs if one.output_type != "stream"]
    assert WIDGET_VIEW not in output.data
    assert "Finished: 3 epochs" in output.data["text/plain"]
    assert "Finished: 3 epochs" in output.data["text/html"]
    assert_draws_two_plots(output.data["text/html"])


def read(path: Path) -> Any:
    return nbformat.read(path, 4)  # type: ignore[no-untyped-call]


def assert_draws_two_plots(page: str) -> None:
    (data,) = re.findall('<img[^>]* src="data:image/svg\\+xml,([^"]+)"', page)
    drawn = unquote(data)
    assert drawn.startswith("<svg ")
    assert drawn.count("<polyline") == 6
    assert "best " in drawn


@pytest.mark.long
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


STARTS = """
import gpupool
from tests.support.trainings import network, samples
gpupool.start(n=1, device="cpu")
result = gpupool.train(network(), samples(64), validation=samples(16), batch_size=16, epochs=4)
gpupool.current_pool().stop()
"""


@pytest.mark.long
def test_the_log_of_papermill_has_a_line_for_each_validation(notebook: Path) -> None:
    pytest.importorskip("papermill", reason="papermill is not installed")
    new = read(notebook)
    new.cells[0].source = STARTS
    nbformat.write(new, notebook)  # type: ignore[no-untyped-call]
    log = by_command("papermill", "--log-output", "NOTEBOOK", "NOTEBOOK")(notebook)
    lines = [line.split(" - ")[-1] for line in log.splitlines()]
    epochs = [line for line in lines if "training  epoch " in line and " val " in line]
    assert len(epochs) >= 4
    assert any(line.startswith("Starting") for line in lines)
    assert sum("finished  epoch 4/4  step 16/16" in line for line in lines) == 1
