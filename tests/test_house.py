"""The house stands: imports run down, names are there, nothing heavy is loaded too early."""

from __future__ import annotations

import ast
import doctest
import importlib
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
    "training": {"core", "pool"},
    "notebook": {"core", "pool", "spmd", "training"},
}
NEVER_AT_IMPORT = {
    "core": {"torch", "ipyparallel", "IPython", "ipywidgets", "anywidget", "numpy", "pynvml"},
    "data": {"ipyparallel", "IPython", "ipywidgets", "anywidget"},
    "host": {"torch", "ipyparallel", "IPython", "ipywidgets", "anywidget"},
    "engine": {"ipywidgets", "anywidget"},
    "pool": {"torch", "ipywidgets", "anywidget", "IPython"},
    "spmd": {"torch", "ipywidgets", "anywidget", "IPython"},
    "training": {"torch", "ipywidgets", "anywidget", "IPython"},
    "notebook": {"torch"},
}
ONLY_HERE = {  # the files that may know ipyparallel at all
    "ipyparallel": {"pool/client.py", "host/controller.py", "engine/boot.py", "engine/emit.py"},
}
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


def imports(file: str, *, at_import: bool) -> set[str]:
    """Dotted names imported by a file: all of them, or those of importing it, type hints aside."""
    tree = ast.parse((ROOT / file).read_text())
    nodes: list[ast.AST] = list(ast.walk(tree))
    if at_import:
        nodes = [
            node
            for top in tree.body
            if not (isinstance(top, ast.If) and "TYPE_CHECKING" in ast.unparse(top.test))
            for node in ([top] if isinstance(top, (ast.Import, ast.ImportFrom)) else [])
        ]
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("file", [f for f in FILES if "/" in f])
def test_imports_run_down_the_house(file: str) -> None:
    folder = file.split("/")[0]
    ours = {name.split(".")[1] for name in imports(file, at_import=False) if "gpupool." in name}
    # the one stub that travels reaches into the engine, where it runs, by design
    allowed = {"engine"} if file == "core/invoke.py" else set()
    assert ours - {folder} - allowed <= MAY_IMPORT[folder]
    heavy = {name.split(".")[0] for name in imports(file, at_import=True)}
    assert not heavy & NEVER_AT_IMPORT[folder]


@pytest.mark.parametrize("file", FILES)
def test_few_files_know_ipyparallel(file: str) -> None:
    roots = {name.split(".")[0] for name in imports(file, at_import=False)}
    assert "ipyparallel" not in roots or file in ONLY_HERE["ipyparallel"]


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


def test_the_names_of_the_static_types_are_those_of_the_package() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If))
    typed = {alias.name for n in block.body for alias in n.names}  # type: ignore[attr-defined]
    loaders = {"load_ipython_extension", "unload_ipython_extension"}
    assert typed == set(gpupool.__all__) - loaders


WIDGETS_AND_TORCH = {"torch", "ipywidgets", "anywidget"}


@pytest.mark.parametrize(
    ("code", "late"),
    [
        ("import gpupool", WIDGETS_AND_TORCH | {"numpy"}),
        ("import gpupool as g; g.start; g.TrainingOptions; g.ImageDatastore", WIDGETS_AND_TORCH),
        (
            "from IPython.core.interactiveshell import InteractiveShell as S\n"
            "S.instance().run_line_magic('load_ext', 'gpupool')",
            WIDGETS_AND_TORCH
            | {"numpy", "ipyparallel", "psutil", "prompt_toolkit", "gpupool.pool.pool"}
            | {"gpupool.notebook.picture", "gpupool.notebook.words", "gpupool.core.plan"},
        ),
        (
            "import gpupool.host.agent, gpupool.host.forkserver",
            WIDGETS_AND_TORCH
            | {"numpy", "psutil", "IPython", "ipyparallel", "argparse", "asyncio"},
        ),
        # what the controller has beyond the fork server, and a rank for a cell
        (
            "import torch, ipyparallel.controller.app, gpupool.host.controller\n"
            "import gpupool.engine.boot, gpupool.engine.entry, gpupool.engine.inference",
            {"ipywidgets", "anywidget", "torch._dynamo", "torch._inductor", "sympy", "triton"}
            | {"torch.distributed.fsdp", "prompt_toolkit", "debugpy"},
        ),
        # by a thread, while the main one may be importing ipyparallel: see front_end.py
        (
            "from gpupool.notebook import progress_view as p\n"
            "from gpupool.core.progress import Course\n"
            "p.open_drawing(Course('Starting', 0, None, '', '', 1.0))",
            WIDGETS_AND_TORCH | {"IPython", "comm"},
        ),
    ],
    ids=["import", "names", "load_ext", "agent", "rank", "progress"],
)
def test_nothing_heavy_is_loaded_early(code: str, late: set[str]) -> None:
    check = f"import sys; print(sorted({late} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{check}"], capture_output=True, text=True, timeout=150
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
