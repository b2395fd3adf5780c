"""`%gpupool check` in a real kernel: its lines, its refusal, and the stop button."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.notebook.kernel import Cell, Kernel
from tests.support.processes import until


def checks_of(kernel: Kernel) -> list[psutil.Process]:
    """The processes that check for a kernel."""
    pid = kernel.run("import os\nprint(os.getpid())").text
    return [
        child
        for child in psutil.Process(int(pid)).children(recursive=True)
        if "gpupool.__main__" in " ".join(child.cmdline())
    ]


def printed(words: str, cell: Cell) -> bool:
    return any(words in content.get("text", "") for _, _, content in cell.messages)


def test_the_lines_come_as_they_are_found(clean_kernel: Kernel) -> None:
    cell = clean_kernel.run("%load_ext gpupool\n%gpupool check --cpu --only machine")
    assert cell.status == "ok"
    header, *lines, summary = cell.text.splitlines()
    assert header.startswith("gpupool ")
    assert [line.split(":")[0].split()[-1] for line in lines] == [
        "start",
        "machine",
        "stop",
        "home",
    ]
    assert summary.startswith("0 of 4 promises not kept")
    came = [at for at, kind, _ in cell.messages if kind == "stream"]
    assert came[0] < came[-1]  # and not all at the end


def test_a_pool_of_the_notebook_is_left_alone(clean_kernel: Kernel) -> None:
    clean_kernel.run("%load_ext gpupool\n%gpupool start --cpu -n 1\nx = %spmd (kept := 7)")
    refused = clean_kernel.run("%gpupool check --cpu --only machine")
    assert refused.error_text.startswith("PoolError: a pool runs in this notebook")
    assert clean_kernel.run("x = %spmd kept\nprint(x[0])").text == "7"
    clean_kernel.run("%gpupool stop")


def test_the_stop_button_ends_it_and_nothing_runs_on(clean_kernel: Kernel, tmp_path: Path) -> None:
    cell = clean_kernel.run(
        "%load_ext gpupool\n%gpupool check --cpu --only kill",
        meanwhile=[(lambda cell: printed("ok  start", cell), clean_kernel.press_stop)],
    )
    assert cell.error_text == (
        "KeyboardInterrupt: %gpupool check was interrupted. Nothing was left running."
    )
    assert "It was interrupted." in cell.text
    until(lambda: not checks_of(clean_kernel), 5.0, "the end of the check")
