"""The quick-start notebook, executed headless as `make demo` does, and read as a user reads it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from demo.run import NOTEBOOK, execute
from tests.notebook.kernel import without_progress
from tests.servers.s3 import SeaweedServer
from tests.support.environment import environment

Outputs = list[dict[str, Any]]


@pytest.fixture(scope="module")
def executed(s3: SeaweedServer, photos_url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = {**s3.env, "GPUPOOL_DEMO_URL": photos_url, "OMP_NUM_THREADS": "1"}
    with environment({**os.environ, **own}):
        return execute(NOTEBOOK, tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="module")
def cells(executed: Path) -> dict[str, Outputs]:
    """Source of each code cell -> its outputs."""
    document = nbformat.read(executed, as_version=4)
    return {c.source: c.outputs for c in document.cells if c.cell_type == "code"}


def outputs_of(cells: dict[str, Outputs], start: str) -> Outputs:
    found = (outputs for source, outputs in cells.items() if source.startswith(start))
    return without_progress(next(found))


def text_of(outputs: Outputs) -> str:
    return "\n".join(o.get("text") or o["data"]["text/plain"] for o in outputs)


def test_what_a_user_reads(cells: dict[str, Outputs]) -> None:
    assert 9 <= len(cells) <= 12
    assert not [o for outputs in cells.values() for o in outputs if o["output_type"] == "error"]
    (bar,) = outputs_of(cells, "%load_ext gpupool")
    assert text_of([bar]).startswith("Pool of 2: stopped")
    assert "<b>Pool of 2</b>" in bar["data"]["text/html"]
    assert text_of(outputs_of(cells, "%gpupool env")).startswith("On 2 ranks:\n")
    text = text_of(outputs_of(cells, "%%spmd"))
    assert all(re.search(rf"rank {rank} of 2 on (cpu|cuda:0): ", text) for rank in (0, 1))
    text = text_of(outputs_of(cells, "test_images ="))
    assert re.search(r"^Test accuracy: \d+\.\d% of 100 images\n\Z", text, re.MULTILINE)
    assert text_of(outputs_of(cells, "%gpupool stop")).endswith("Pool stopped.\n")


def test_the_monitor_is_left_as_a_still_picture_and_the_page_needs_no_network(
    cells: dict[str, Outputs], executed: Path
) -> None:
    (output,) = outputs_of(cells, "result = gpupool.train")
    data = output["data"]
    assert set(data) == {"text/html", "text/plain"}
    assert data["text/html"].count("data:image/svg+xml") == 1
    assert "Finished" in data["text/html"]
    assert "images/s" in data["text/plain"]
    page = executed.with_suffix(".html").read_text()
    assert "<script" not in page
    assert not re.findall(r"""(?:src|href)=["']https?://""", page)
    assert not re.findall(r"""url\(["']?https?://""", page)
