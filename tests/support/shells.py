"""A kernel and a shell on a pipe that files of tests have in turn: their starters know torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook.kernel import Cell, Kernel
from tests.notebook.terminal import Terminal

ROOT = Path(__file__).parents[2]
REMEMBER = "import os\nos.first_environ, os.first_folder = dict(os.environ), os.getcwd()"
# the magics stay, and the starter, with torch imported
UNLOAD = """
import os, sys
if "ipywidgets" in sys.modules:
    sys.modules["ipywidgets"].Widget.close_all()
get_ipython().extension_manager.loaded.discard("gpupool")
os.environ.clear()
os.environ.update(os.first_environ)
os.chdir(os.first_folder)
"""
CLEAN = ["%load_ext gpupool", "%gpupool stop", UNLOAD, "%reset -f"]


def variables(tmp: Path) -> dict[str, str]:
    """Folders of their own, so that a start reports nothing that others' pools leave behind."""
    folders = {"TMPDIR": str(tmp), "XDG_CACHE_HOME": str(tmp / "cache"), "PYTHONPATH": str(ROOT)}
    return {**folders, "AWS_EC2_METADATA_DISABLED": "true"}


def leave_clean(shell: Kernel | Terminal) -> None:
    """Leave a shell as it was before its first cell, but that modules stay imported."""
    for code in CLEAN:
        ran = shell.run(code)
        assert ran.status == "ok" if isinstance(ran, Cell) else ran.success, code


@pytest.fixture(scope="session")
def _lasting_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel(**variables(tmp_path_factory.mktemp("tmp"))) as kernel:
        assert kernel.run(REMEMBER).status == "ok"
        yield kernel


@pytest.fixture(scope="module")
def clean_kernel(_lasting_kernel: Kernel) -> Iterator[Kernel]:
    """A kernel as it comes, but that the files before had it: so a pool starts in a moment. Leave
    it alive, and end what is begun outside of gpupool, the environment and the namespace."""
    yield _lasting_kernel
    leave_clean(_lasting_kernel)


@pytest.fixture(scope="session")
def _lasting_terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    with Terminal(**variables(tmp_path_factory.mktemp("tmp"))) as terminal:
        assert terminal.run(REMEMBER).success
        yield terminal


@pytest.fixture(scope="module")
def clean_terminal(_lasting_terminal: Terminal) -> Iterator[Terminal]:
    """The same of IPython without a kernel."""
    yield _lasting_terminal
    leave_clean(_lasting_terminal)
