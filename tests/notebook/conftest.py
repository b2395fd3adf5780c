"""Histories to draw, and a kernel that files of tests have in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from gpupool.training.history import TrainingHistory
from tests.notebook.feed import training_events
from tests.notebook.kernel import Kernel

# as %unload_ext does it, but that the agent stays, with torch imported
UNLOAD = """
from gpupool.notebook.magics import magics
magics.unregister(get_ipython())
get_ipython().extension_manager.loaded.discard("gpupool")
"""


@pytest.fixture
def history_of() -> Callable[..., TrainingHistory]:
    """Makes a history of `training_events(**arguments)`."""

    def make(**arguments: int | None) -> TrainingHistory:
        history = TrainingHistory()
        for event in training_events(**arguments):  # type: ignore[arg-type]
            history.add(event)
        return history

    return make


@pytest.fixture(scope="session")
def _lasting_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    # a folder of its own, so that a start tells of nothing that others' pools leave
    with Kernel(TMPDIR=str(tmp_path_factory.mktemp("tmp"))) as kernel:
        yield kernel


@pytest.fixture(scope="module")
def clean_kernel(_lasting_kernel: Kernel) -> Iterator[Kernel]:
    """A kernel as it comes, but that the files before had it: so a pool starts in a moment.

    For files that leave it alive, and end what they begin outside of gpupool and the namespace.
    """
    yield _lasting_kernel
    assert _lasting_kernel.run("%load_ext gpupool").status == "ok"
    assert _lasting_kernel.run("%gpupool auto off\n%gpupool stop").status == "ok"
    assert _lasting_kernel.run(UNLOAD).status == "ok"
    assert _lasting_kernel.run("%reset -f").status == "ok"
