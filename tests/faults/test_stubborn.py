"""Ranks that import when they are to end: half of a package would stay in the process for good."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.invariants import Faulty
from tests.support.processes import reach
from tests.support.waits import until_there

# rank 1 raises once the others have begun to run a file that is named like a library's
IMPORT = """
from gpupool.engine.calls import LIBRARIES
library = {begun!r} + chr(10) + "import time; end = time.monotonic() + 2" + chr(10)
library += "while time.monotonic() < end: time.sleep(0.01)" + chr(10) + "whole = True"
if rank == 1:
{others}
    raise ValueError("one")
exec(compile(library, LIBRARIES[0] + "/library.py", "exec"))
import time; time.sleep(60)
"""


@pytest.mark.long
def test_after_an_error_of_another_rank_the_import_is_finished_and_then_the_cell_ends(
    faulty: Faulty, tmp_path: Path
) -> None:
    begun = tmp_path / "rank"
    others = "\n".join(until_there(Path(f"{begun}{rank}"), margin="    ") for rank in (0, 2))
    error = faulty.fails(IMPORT.format(begun=reach(begun), others=others))
    assert error.first.rank == 1
    assert error.errors[0].freed
    assert dict(faulty.pool.run("whole", ranks=[0, 2])) == {0: True, 2: True}
    faulty.check()
