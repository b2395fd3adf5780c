"""Ranks that do not react: it is said before they are killed, and the others keep what they have.

See `test_table.py` for what is shown elsewhere.
"""

from __future__ import annotations

import os
import signal
import textwrap
import time
from pathlib import Path

import pytest

from tests.faults.invariants import Faulty
from tests.support.processes import gone, reach, reached, until, wait_for

BARE = "import time\nwhile True:\n    try:\n        HERE; time.sleep(60)\n    except: pass"
HOLDS_THE_GIL = "import itertools\nHERE; any(itertools.repeat(0))"


def on_rank_1(code: str, begun: Path) -> str:
    """It leaves the file `begun`1 when it no longer reacts."""
    code = textwrap.indent(code.replace("HERE", reach(begun)), "    ")
    return f"if rank == 1:\n{code}\ndist.all_reduce(torch.ones(1))"


@pytest.mark.long
@pytest.mark.usefixtures("short_ladder")
@pytest.mark.parametrize("code", [BARE, HOLDS_THE_GIL], ids=["bare except", "GIL"])
def test_it_is_said_and_to_stop_again_kills(faulty: Faulty, tmp_path: Path, code: str) -> None:
    execution = faulty.begin(on_rank_1(code, tmp_path / "rank"))
    until(lambda: reached(tmp_path / "rank", 1), 5.0)
    time.sleep(0.3)
    execution.interrupt()
    until(lambda: bool(faulty.notices), 10.0, "a notice")
    assert not gone(faulty.pid(1))  # not before it has been said
    assert faulty.notices[0].startswith("rank 1 does not respond to the interrupt")
    assert "killed and replaced" in faulty.notices[0]
    execution.interrupt()
    error = faulty.ended(execution)
    assert "killed" in str(error.errors[1])
    faulty.check(lost=[1])


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


@pytest.mark.long
def test_a_rank_that_goes_on_in_time_is_not_replaced(faulty: Faulty) -> None:
    execution = faulty.begun("if rank != 1: dist.barrier()\n__import__('time').sleep(600)")
    os.kill(faulty.pid(1), signal.SIGSTOP)
    execution.interrupt()
    until(lambda: any("rank 1 does not respond" in text for text in faulty.notices), 10.0)
    os.kill(faulty.pid(1), signal.SIGCONT)
    assert faulty.ended(execution).first.ename == "KeyboardInterrupt"
    faulty.check()
