"""A kernel and a shell on a pipe that files of tests have in turn: their agents know torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.notebook.kernel import Kernel
from tests.notebook.terminal import Terminal

ROOT = Path(__file__).parents[2]
REMEMBER = "import os\nos.first_environ = dict(os.environ)"
# as %unload_ext does it, but that the agent stays, with torch imported
UNLOAD = """
import os
from gpupool.notebook.magics import magics
magics.unregister(get_ipython())
get_ipython().extension_manager.loaded.discard("gpupool")
os.environ.clear()
os.environ.update(os.first_environ)
"""
CLEAN = ["%load_ext gpupool", "%gpupool auto off\n%gpupool stop", UNLOAD, "%reset -f"]


def variables(tmp: Path) -> dict[str, str]:
    """A folder of its own, so that a start reports nothing that others' pools leave behind."""
    return {"TMPDIR": str(tmp), "PYTHONPATH": str(ROOT), "AWS_EC2_METADATA_DISABLED": "true"}


def clean(ran_well: Callable[[str], bool]) -> None:
    """Leave a shell as it was before its first cell, but that modules stay imported."""
    for code in CLEAN:
        assert ran_well(code), code


@pytest.fixture(scope="session")
def _lasting_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel(**variables(tmp_path_factory.mktemp("tmp"))) as kernel:
        assert kernel.run(REMEMBER).status == "ok"
        yield kernel


@pytest.fixture(scope="module")
def clean_kernel(_lasting_kernel: Kernel) -> Iterator[Kernel]:
    """A kernel as it comes, but that the files before had it: so a pool starts in a moment.

    For files that leave it alive, and end what they begin outside of gpupool, the environment and
    the namespace.
    """
    yield _lasting_kernel
    clean(lambda code: _lasting_kernel.run(code).status == "ok")


@pytest.fixture(scope="session")
def _lasting_terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    with Terminal(**variables(tmp_path_factory.mktemp("tmp"))) as terminal:
        assert terminal.run(REMEMBER).success
        yield terminal


@pytest.fixture(scope="module")
def clean_terminal(_lasting_terminal: Terminal) -> Iterator[Terminal]:
    """The same of IPython without a kernel."""
    yield _lasting_terminal
    clean(lambda code: _lasting_terminal.run(code).success)
