"""What holds for every line of the package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import gpupool

PACKAGE = Path(gpupool.__file__).parent


def test_weights_are_loaded_without_running_what_is_in_the_file() -> None:
    """`torch.load` with weights_only=True, always: a pickle would run code."""
    calls = [
        (path.name, node)
        for path in PACKAGE.rglob("*.py")
        if "torch.load" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert calls
    for name, call in calls:
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert options.get("weights_only") == "True", f"{name}, line {call.lineno}"


def test_one_file_calls_cuda() -> None:
    """`gpupool/data/device.py`, which a device of the tests takes the place of."""
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\btorch\.cuda\b(?!`)", path.read_text())
    }
    assert found == {"data/device.py"}
