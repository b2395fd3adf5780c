"""Ranks that do not react, or import: what is said before they are killed, or that they may end it.

See `test_table.py` for what is shown elsewhere.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.invariants import Faulty

STUBBORN = """
import os, time
if rank == 0:
    while not os.path.exists({begun!r}): time.sleep(0.02)
    raise ValueError("zero")
while rank == 1:
    try: open({begun!r}, "w").close(); time.sleep(60)
    except: pass
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.long
@pytest.mark.usefixtures("short_ladder")
def test_after_a_while_it_is_killed_without_being_asked(faulty: Faulty, tmp_path: Path) -> None:
    error = faulty.fails(STUBBORN.format(begun=str(tmp_path / "begun")))
    assert str(error).startswith("rank 0: ValueError: zero")
    assert "rank 1 does not respond" in faulty.notices[0]
    faulty.check(lost=[1])


# half of a package would stay in the process for good
LIBRARY = """
import os, time
open({begun!r} + os.environ["RANK"], "w").close()
end = time.monotonic() + 2
while time.monotonic() < end:
    time.sleep(0.01)
whole = True
"""


@pytest.fixture
def library(tmp_path: Path) -> Iterator[str]:
    """The name of a module among the installed ones that takes 2 s to import."""
    name = f"gpupool_test_library_{time.monotonic_ns()}"
    path = Path(sysconfig.get_path("purelib"), f"{name}.py")
    path.write_text(LIBRARY.format(begun=str(tmp_path / "rank")))
    yield name
    path.unlink()


@pytest.mark.long
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
