"""The quick-start notebook, executed headless as `make demo` does, and read as a user reads it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from demo.run import NOTEBOOK, execute
from tests.e2e.test_notebooks import Cells, as_read, code_cells, find
from tests.notebook.kernel import without_progress
from tests.servers.s3 import SeaweedServer
from tests.support.environment import environment


@pytest.fixture(scope="module")
def executed(s3: SeaweedServer, photos_url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = {**s3.env, "GPUPOOL_DEMO_URL": photos_url, "OMP_NUM_THREADS": "1"}
    with environment({**os.environ, **own}):
        return execute(NOTEBOOK, tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="module")
def cells(executed: Path) -> Cells:
    return [as_read(cell.source, cell.outputs) for cell in code_cells(executed)]


def test_what_a_user_reads(executed: Path, cells: Cells) -> None:
    outputs = [output for cell in code_cells(executed) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    text, html = find(cells, "%load_ext gpupool")
    assert text.startswith("Pool of 2: stopped")
    assert html.count("<b>Pool of 2</b>") == 1
    assert find(cells, "%gpupool env")[0].startswith("On 2 ranks:\n")
    text, _ = find(cells, "%%spmd")
    assert all(re.search(rf"rank {rank} of 2 on (cpu|cuda:0): ", text) for rank in (0, 1))
    text, _ = find(cells, "test_images =")
    assert re.search(r"^Test accuracy: \d+\.\d% of 100 images\n\Z", text, re.MULTILINE)
    assert find(cells, "%gpupool stop")[0].endswith("Pool stopped.\n")


def test_the_monitor_is_left_as_a_still_picture_and_the_page_needs_no_network(
    executed: Path,
) -> None:
    (cell,) = (cell for cell in code_cells(executed) if "result = gpupool.train" in cell.source)
    (output,) = without_progress(cell.outputs)
    data = output["data"]
    assert set(data) == {"text/html", "text/plain"}
    assert data["text/html"].count("data:image/svg+xml") == 1
    assert "Finished" in data["text/html"]
    assert "images/s" in data["text/plain"]
    page = executed.with_suffix(".html").read_text()
    assert "<script" not in page
    assert not re.findall(r"""(?:src|href)=["']https?://""", page)
    assert not re.findall(r"""url\(["']?https?://""", page)
