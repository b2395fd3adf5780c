"""Who is said to have failed, and who was only freed. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gpupool.core.errors import RankError, SpmdError
from gpupool.core.wire.location import Collective, Location
from gpupool.core.wire.replies import Raised
from gpupool.pool.calls.failures import resolve

LOST = "[pair.cc:561] Connection closed by peer [127.0.0.1]:4321."
IN_COLLECTIVE = Location("Cell In[3], line 2", Collective("all_reduce", 5))
COMPUTING = Location("Cell In[3], line 7")


def raised(rank: int, at: float, ename: str = "ValueError", evalue: str = "x") -> Raised:
    return Raised(RankError(rank, ename, evalue, failed_at=at))


def lost(rank: int, at: float) -> Raised:
    return Raised(RankError(rank, "RuntimeError", LOST, failed_at=at), collective=True)


def interrupted(rank: int, at: float) -> Raised:
    return raised(rank, at, "KeyboardInterrupt", evalue="")


def resolved(
    *failures: Raised,
    asked: bool = False,
    limit: tuple[str, str] | None = None,
    freed_at: float | None = None,
    where: Mapping[int, Location] | None = None,
) -> SpmdError:
    by_rank = {failure.error.rank: failure for failure in failures}
    told = resolve(by_rank, asked=asked, limit=limit, freed_at=freed_at, where=where or {})
    return SpmdError(told, 3)


@pytest.mark.parametrize(
    ("failures", "freed_at", "first", "others"),
    [  # a death, though its peers noticed it before it was told
        ((lost(0, 1.0), raised(1, 2.0, "EngineDiedError"), lost(2, 1.0)), None, 1, [0, 2]),
        # two that raise by themselves
        ((raised(0, 1.2, "KeyError"), raised(1, 1.0), lost(2, 1.3)), 1.25, 1, [2]),
        # collectives that fail by themselves
        ((lost(0, 1.0), lost(1, 1.1), lost(2, 1.4)), 1.3, 0, [2]),
    ],
)
def test_who_failed_by_itself_is_a_cause_and_the_others_were_freed(
    failures: tuple[Raised, ...], freed_at: float | None, first: int, others: list[int]
) -> None:
    error = resolved(*failures, freed_at=freed_at)
    assert error.first.rank == first
    assert [rank for rank, one in error.errors.items() if one.freed] == others


def test_who_raised_is_the_cause_also_if_others_were_interrupted() -> None:
    where = {0: IN_COLLECTIVE, 2: COMPUTING}
    error = resolved(
        interrupted(0, 1.3), raised(1, 1.0), interrupted(2, 1.3), freed_at=1.25, where=where
    )
    assert error.first.rank == 1
    assert error.others() == {
        "waiting in all_reduce (Cell In[3], line 2)": [0],
        "stopped at Cell In[3], line 7": [2],
    }


def test_who_is_stopped_was_interrupted_in_its_collective_or_at_its_line() -> None:
    error = resolved(lost(0, 1.0), interrupted(1, 1.0), asked=True, where={0: IN_COLLECTIVE})
    assert str(error.first) == "KeyboardInterrupt"
    assert error.others() == {"waiting in all_reduce (Cell In[3], line 2)": [0]}
    error = resolved(lost(0, 1.0), lost(1, 1.0), asked=True, where={0: IN_COLLECTIVE})
    assert [str(one) for one in error.errors.values()] == [
        "KeyboardInterrupt: in all_reduce",
        "KeyboardInterrupt: in a collective",
    ]
    assert not any(one.freed for one in error.errors.values())
    assert str(resolved(lost(0, 1.0), asked=True).first) == "KeyboardInterrupt: in a collective"


def test_what_was_raised_before_the_stop_stays_the_cause() -> None:
    error = resolved(
        raised(0, 1.0), interrupted(1, 2.0), asked=True, limit=("TimeoutError", "late")
    )
    assert [one.ename for one in error.errors.values()] == ["ValueError", "TimeoutError"]
    assert error.first.rank == 0


def test_of_a_killed_rank_is_told_where_it_was() -> None:
    error = resolved(raised(1, 1.0, "EngineDiedError"), where={1: IN_COLLECTIVE})
    assert error.first.was == "in all_reduce (Cell In[3], line 2)"
