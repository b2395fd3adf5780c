"""Ranks that do not react: it is said before they are killed, and the others keep what they have.

See `test_table.py` for what is shown elsewhere.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.faults.invariants import Faulty
from tests.support.processes import reach, wait_for

BARE = "import time\nwhile True:\n    try:\n        HERE; time.sleep(60)\n    except: pass"


def on_rank_1(code: str, begun: Path) -> str:
    """It leaves the file `begun`1 when it no longer reacts."""
    code = textwrap.indent(code.replace("HERE", reach(begun)), "    ")
    return f"if rank == 1:\n{code}\ndist.all_reduce(torch.ones(1))"


@pytest.mark.long
@pytest.mark.usefixtures("short_ladder")
def test_after_a_while_it_is_killed_without_being_asked(faulty: Faulty, tmp_path: Path) -> None:
    begun = tmp_path / "rank"
    wait = textwrap.indent(wait_for(Path(f"{begun}1")), "    ")
    error = faulty.fails(
        f"if rank == 0:\n{wait}\n    raise ValueError('zero')\n{on_rank_1(BARE, begun)}"
    )
    assert str(error).startswith("rank 0: ValueError: zero")
    assert "rank 1 does not respond" in faulty.notices[0]
    faulty.check(lost=[1])
