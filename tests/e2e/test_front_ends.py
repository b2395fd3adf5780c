"""What papermill leaves of a notebook, and the log that it writes. Browsers: tests/browser."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.notebook.kernel import plain
from tests.support.raising import frames_of_ours

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
CELLS = [
    "%load_ext gpupool\n%gpupool start --cpu -n 2",
    "%%spmd\nprint('hello of', world_size)\nrank * 2",
    """
import gpupool
from tests.support.trainings import network, samples
result = gpupool.train(network(), samples(64), validation=samples(16), batch_size=16, epochs=4)
""",
    "%%spmd\nif rank == 1: raise ValueError('bad value')\ndist.barrier()",
    "print('never')",
]


def test_a_notebook_that_papermill_executes_reads_as_in_a_front_end(tmp_path: Path) -> None:
    pytest.importorskip("papermill")
    path = tmp_path / "notebook.ipynb"
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    done = subprocess.run(
        [sys.executable, "-m", "papermill", "--log-output", str(path), str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    said = plain(done.stderr)
    assert done.returncode != 0
    assert "SpmdError: rank 1: ValueError: bad value (1 of 2 ranks failed" in said
    code = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    outputs = {cell.source: cell.outputs for cell in code}
    shown = outputs[CELLS[1]][0]["data"]["text/plain"]
    assert shown == "[0, 1] hello of 2\nOut[2]:\n[0] 0\n[1] 2"
    errors = [one for one in outputs[CELLS[3]] if one["output_type"] == "error"]
    assert not frames_of_ours("\n".join(errors[0]["traceback"]))
    assert outputs[CELLS[4]] == []  # it stopped before
    # nobody can see a widget: a line for each validation, and one at the end
    lines = [line.split(" - ")[-1] for line in said.splitlines()]
    assert sum("training  epoch " in line and " val " in line for line in lines) >= 4
    assert sum("finished  epoch 4/4  step 16/16" in line for line in lines) == 1
