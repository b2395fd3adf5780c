"""The import of a library is not cut off: half of a package would stay in the process for good."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.invariants import Faulty

pytestmark = pytest.mark.long

LIBRARY = """
import os, time
open({begun!r} + os.environ["RANK"], "w").close()
end = time.monotonic() + {seconds}
while time.monotonic() < end:
    time.sleep(0.01)
whole = True
"""


@pytest.fixture
def library(tmp_path: Path) -> str:
    """The name of a module among the installed ones that takes 2 s to import."""
    import sysconfig

    name = f"gpupool_test_library_{time.monotonic_ns()}"
    path = Path(sysconfig.get_path("purelib"), f"{name}.py")
    path.write_text(LIBRARY.format(seconds=2, begun=str(tmp_path / "rank")))
    yield name  # type: ignore[misc]
    path.unlink()


def test_after_an_error_of_another_rank_the_import_is_finished_and_then_the_cell_ends(
    faulty: Faulty, library: str, tmp_path: Path
) -> None:
    both = [str(tmp_path / f"rank{rank}") for rank in (0, 2)]
    source = (
        "import os, time\nif rank == 1:\n"
        f"    while not all(map(os.path.exists, {both})): time.sleep(0.01)\n"
        f"    raise ValueError('one')\nimport {library}\ntime.sleep(60)"
    )
    error = faulty.fails(source)
    assert error.first.rank == 1
    assert error.errors[0].freed
    whole = f"import sys; sys.modules['{library}'].whole"
    assert dict(faulty.pool.run(whole, ranks=[0, 2])) == {0: True, 2: True}
    faulty.check()
