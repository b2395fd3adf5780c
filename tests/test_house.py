"""The house stands: imports run down, names are there, nothing heavy is loaded too early."""

from __future__ import annotations

import ast
import doctest
import graphlib
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpupool

ROOT = Path(gpupool.__file__).parent
# folder -> folders of ours it may import from (itself always); see ARCHITECTURE.md
MAY_IMPORT = {
    "core": set(),
    "data": {"core"},
    "host": {"core"},
    "engine": {"core", "data"},
    "pool": {"core"},
    "spmd": {"core", "pool"},
    "training": {"core", "data", "pool"},  # of data/ stores of sweeps, and previews
    "check": {"core"},  # else what the package gives to users
    "notebook": {"core", "pool", "spmd", "training"},
}
KNOW_IPYPARALLEL = {
    "pool/engines/client.py",
    "host/controller.py",
    "engine/boot.py",
    "engine/output/emit.py",
}
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


def imports(file: str) -> set[str]:
    """All that a file imports, wherever it does: in functions and for hints of types too."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def file_of(name: str) -> str | None:
    """The file of ours that a dotted name is in, or None; the package's own names are nobody's."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        file = "/".join(parts[1:end]) + ".py"
        if parts[0] == "gpupool" and file in FILES:
            return file
    return None


def room_of(file: str) -> str:
    """ "engine/group" of "engine/group/abort.py"; a file outside a room is a room of its own."""
    folder, *rest = file.split("/")
    return f"{folder}/{rest[0]}" if len(rest) > 1 else file


def test_folders_rooms_and_imports_are_in_order() -> None:
    faults = []
    files: dict[str, set[str]] = {}
    rooms: dict[str, set[str]] = {}
    for file in (f for f in FILES if "/" in f and not f.endswith("__init__.py")):
        folder = file.split("/")[0]
        found = imports(file)
        ours = {other for name in found if (other := file_of(name))}
        outside = {other.split("/")[0] for other in ours} - {folder} - MAY_IMPORT[folder]
        faults += [f"{file} imports from {other}" for other in outside]
        if file not in KNOW_IPYPARALLEL and any(name.startswith("ipyparallel") for name in found):
            faults.append(f"{file} knows ipyparallel")
        files[file] = ours
        rooms.setdefault(room_of(file), set()).update(map(room_of, ours))
    for room, others in rooms.items():
        others.discard(room)
    assert faults == []
    for edges in (files, rooms):
        graphlib.TopologicalSorter(edges).prepare()  # else CycleError, which has the circle


@pytest.mark.parametrize("file", [f for f in FILES if ">>>" in (ROOT / f).read_text()])
def test_the_examples_in_docstrings_are_true(file: str) -> None:
    module = importlib.import_module(f"gpupool.{file.removesuffix('.py').replace('/', '.')}")
    tried = doctest.testmod(module)
    assert tried.attempted > 0
    assert tried.failed == 0


def test_every_public_name_is_there_and_documented() -> None:
    for name in gpupool.__all__:
        assert getattr(gpupool, name).__doc__, f"gpupool.{name} has no docstring"
    assert set(dir(gpupool)) == set(gpupool.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = gpupool.nonsense


WIDGETS_AND_TORCH = {"torch", "ipywidgets", "anywidget"}


@pytest.mark.parametrize(
    ("code", "late"),
    [
        ("import gpupool", WIDGETS_AND_TORCH | {"numpy"}),
        (
            "import gpupool as g\n"
            "g.start; g.train; g.predict; g.sweep; g.scaling; g.TrainingOptions; g.ImageDatastore",
            WIDGETS_AND_TORCH,
        ),
        (
            "from IPython.core.interactiveshell import InteractiveShell as S\n"
            "S.instance().run_line_magic('load_ext', 'gpupool')",
            WIDGETS_AND_TORCH
            | {"numpy", "ipyparallel", "prompt_toolkit", "gpupool.pool.pool"}
            | {"gpupool.notebook.monitor.picture", "gpupool.notebook.monitor.words"},
        ),
        (
            "import gpupool.host.starter",
            WIDGETS_AND_TORCH | {"numpy", "IPython", "ipyparallel", "argparse", "asyncio"},
        ),
        # what the controller has beyond the starter, and a rank for a cell
        (
            "import torch, ipyparallel.controller.app, gpupool.host.controller\n"
            "import gpupool.engine.boot, gpupool.engine.entry, gpupool.engine.jobs",
            {"ipywidgets", "anywidget", "torch._dynamo", "torch._inductor", "sympy", "triton"}
            | {"torch.distributed.fsdp", "prompt_toolkit", "debugpy"},
        ),
        # by a thread, while the main one may be importing ipyparallel: see front_end.py
        (
            "from gpupool.notebook.page import progress_view as p\np.open_drawing()",
            WIDGETS_AND_TORCH | {"IPython", "comm"},
        ),
    ],
    ids=["import", "names", "load_ext", "starter", "rank", "progress"],
)
def test_nothing_heavy_is_loaded_early(code: str, late: set[str]) -> None:
    check = f"import sys; print(sorted({late} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{check}"], capture_output=True, text=True, timeout=150
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_one_file_calls_cuda() -> None:
    """`gpupool/data/device.py`, which a device of the tests takes the place of."""
    found = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if re.search(r"\btorch\.cuda\b(?!`)", path.read_text())
    }
    assert found == {"data/device.py"}
