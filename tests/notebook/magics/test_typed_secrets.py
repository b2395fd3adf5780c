"""A secret typed into a cell: refused, gone from IPython's history, and the user told the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebook.kernel import Kernel

TYPED = "hf_typed81q7wLm0"


@pytest.fixture(scope="module")
def kernel(clean_kernel: Kernel) -> Kernel:
    assert clean_kernel.run("%load_ext gpupool").status == "ok"
    return clean_kernel


@pytest.mark.parametrize(
    "line",
    [
        f"%gpupool env HF_TOKEN={TYPED}",
        f"x = 1\n%gpupool env AWS_* HF_TOKEN='{TYPED} and more'",
        f'%gpupool env "HF_TOKEN={TYPED}',
        f"%gpupool start -n 2 --env HF_TOKEN={TYPED}",
    ],
)
def test_a_typed_value_is_refused_and_leaves_the_history(kernel: Kernel, line: str) -> None:
    cell = kernel.run(line)
    assert cell.error_text.startswith("OptionsError: HF_TOKEN=...: name the variable only")
    assert "still in this cell: delete it there" in cell.error_text
    assert TYPED not in str(cell.outputs)
    seen = kernel.run(
        "print(In, _ih, _i, _ii, _iii, [v for k, v in globals().items() if k[:2] == '_i'])"
    )
    assert TYPED not in seen.text
    assert seen.text.count("stood here") >= 4
    searched = kernel.run("%history -g hf_typed*\n%history")
    assert TYPED not in searched.text
    kernel.run("get_ipython().history_manager.writeout_cache()")
    files = [path for path in Path(kernel.folder).rglob("*") if path.is_file()]
    assert any(path.name == "history.sqlite" for path in files)
    assert [path for path in files if TYPED.encode() in content(path)] == []


def content(path: Path) -> bytes:
    """What is in a file; nothing if it is gone, as SQLite's journal is after each write."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def test_other_cells_stay_in_the_history(kernel: Kernel) -> None:
    kernel.run("kept = 'this one stays'")
    kernel.run(f"%gpupool env HF_TOKEN={TYPED}")
    assert "this one stays" in kernel.run("%history").text
    assert "this one stays" in kernel.run("print(In)").text


def test_options_with_values_are_no_typed_secrets(kernel: Kernel) -> None:
    cell = kernel.run("%gpupool start --backend=wrong --timeout=30")
    assert "delete it there" not in cell.error_text
    assert "--backend=wrong" in kernel.run("print(In)").text
