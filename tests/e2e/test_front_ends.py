"""A small notebook that papermill executes: read as a user reads it. Browsers: tests/browser."""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.notebook.kernel import plain, without_progress
from tests.support.raising import frames_of_ours
from tests.support.waits import peers

pytestmark = pytest.mark.long


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


# One red point, made by hand: no library for figures is needed.
PNG = (
    b"\x89PNG\r\n\x1a\n"
    + _chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
    + _chunk(b"IDAT", zlib.compress(b"\x00\xff\x00\x00"))
    + _chunk(b"IEND", b"")
)
START = "%load_ext gpupool\n%gpupool start --cpu -n 2"
BAD = "%%spmd\nif rank == 1:\n    until_told(); raise ValueError('bad value')\ndist.barrier()"
CELLS = [
    START,
    "%%spmd\nprint('hello of', world_size)\nrank * 2",
    f"%%spmd -t 0\nimport base64\nfrom IPython.display import Image, display\n"
    f"display(Image(base64.b64decode('{base64.b64encode(PNG).decode()}')))",
    "%%spmd --nowait -o handle\nimport os, time\n"
    "while not os.path.exists('FOLDER/go'): time.sleep(0.02)\nrank + 40",
    "open('FOLDER/go', 'w').close()\nawait handle",
    "%%spmd -o none --view quiet\nprint('unseen')",
    "PEERS",
    BAD,  # is allowed to fail
    "%spmd rank",
    "PEERS",
    BAD.replace("bad value", "worse value"),
    "print('never')",
]
ALLOWED, FATAL = 7, 10


def cells_in(folder: Path, cells: list[str] = CELLS) -> list[str]:
    """The cells, with files of this folder by which they wait for each other."""
    return [
        f"%%spmd\n{peers(folder / str(n))}"
        if cell == "PEERS"
        else cell.replace("FOLDER", str(folder))
        for n, cell in enumerate(cells)
    ]


FREED = "1 was waiting"


def cause(number: int, value: str = "bad value", other: str = FREED) -> str:
    """The message of a failing cell."""
    return (
        f"SpmdError: rank 1: ValueError: {value} "
        f"(1 of 2 ranks failed, {other}; Cell In[{number}], line 3)"
    )


@dataclass
class Read:
    """What a front end has left: the outputs of each cell, and what it says at the end."""

    cells: list[list[dict[str, Any]]] = field(default_factory=list)
    message: str = ""


def notebook(sources: list[str]) -> nbformat.NotebookNode:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    if len(cells) == len(CELLS):
        cells[ALLOWED].metadata["tags"] = ["raises-exception"]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def with_papermill(folder: Path) -> Read:
    papermill = pytest.importorskip("papermill")
    given, done = folder / "given.ipynb", folder / "done.ipynb"
    sources = cells_in(folder)
    nbformat.write(notebook(sources), given)
    with pytest.raises(papermill.PapermillExecutionError) as caught:
        papermill.execute_notebook(str(given), str(done), progress_bar=False)
    cells = [cell for cell in nbformat.read(done, 4).cells if cell.cell_type == "code"]
    by_source = {cell.source: cell.outputs for cell in cells}
    return Read([by_source[source] for source in sources], str(caught.value))


def test_a_notebook_that_papermill_executes_reads_as_in_a_front_end(tmp_path: Path) -> None:
    read = with_papermill(tmp_path)
    texts = [as_text(outputs) for outputs in read.cells]
    assert "Pool of 2: idle, CPU ranks, gloo" in texts[0]
    assert texts[1] == "[0, 1] hello of 2\nOut[2]:\n[0] 0\n[1] 2"
    assert any("data:image/png" in o["data"]["text/html"] for o in read.cells[2])
    assert texts[3] == "SpmdRun(running)"
    assert texts[4].startswith("[0] 40\n[1] 41")
    assert texts[5] == ""
    assert cause(ALLOWED + 1) in texts[ALLOWED]
    assert f"Cell In[{ALLOWED + 1}], line 4" in texts[ALLOWED]  # where the other one waited
    assert texts[ALLOWED + 1] == "[0] 0\n[1] 1"
    assert not frames_of_ours(texts[FATAL])
    assert cause(FATAL + 1, "worse value") in plain(read.message)
    assert texts[-1] == ""  # it stopped before


def as_text(outputs: list[dict[str, Any]]) -> str:
    """What a reader without HTML sees."""
    parts = []
    for output in without_progress(outputs):
        if output["output_type"] == "error":
            parts.append("\n".join(output["traceback"]))
        else:
            parts.append(output.get("text") or output["data"].get("text/plain", ""))
    return plain("\n".join(part.rstrip("\n") for part in parts))
