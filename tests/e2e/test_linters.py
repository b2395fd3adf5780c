"""The settings of docs/how-to/linters.md do what it says of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "linters.md"
CELLS = [
    "import json",
    "%%spmd\ntotal = json.dumps( [rank] )",  # an odd space, which tells who formats it
    "print(total[0])",
]


def settings(*, with_ours: bool) -> str:
    """A pyproject.toml, with what the page adds or without."""
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return block if with_ours else ""


def ruff(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    beside = Path(sys.executable).with_name("ruff")
    program = str(beside) if beside.exists() else shutil.which("ruff")
    if program is None:
        pytest.skip("ruff is not installed")
    command = [program, *options, "--no-cache", "work.ipynb"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    nbformat.write(
        nbformat.v4.new_notebook(cells=cells, metadata=metadata), tmp_path / "work.ipynb"
    )
    return tmp_path


@pytest.mark.parametrize(("with_ours", "found"), [(False, {"F401", "F821"}), (True, set())])
def test_ruff_is_quiet_about_what_only_spmd_cells_use_and_make(
    folder: Path, with_ours: bool, found: set[str]
) -> None:
    (folder / "pyproject.toml").write_text(settings(with_ours=with_ours))
    done = ruff(folder, "check", "--select=F", "--output-format=json")
    assert {message["code"] for message in json.loads(done.stdout)} == found, done.stderr


def test_ruff_leaves_spmd_cells_as_they_are(folder: Path) -> None:
    (folder / "pyproject.toml").write_text(settings(with_ours=True))
    assert ruff(folder, "format").returncode == 0
    cells = nbformat.read(folder / "work.ipynb", as_version=4).cells
    assert [cell.source for cell in cells] == CELLS


def test_black_formats_spmd_cells_too(folder: Path) -> None:
    pytest.importorskip("black", reason="black is not installed")
    (folder / "pyproject.toml").write_text(settings(with_ours=True))
    command = [sys.executable, "-m", "black", "--quiet", "work.ipynb"]
    subprocess.run(command, cwd=folder, check=True, timeout=30)
    cells = nbformat.read(folder / "work.ipynb", as_version=4).cells
    assert cells[1].source == "%%spmd\ntotal = json.dumps([rank])"
