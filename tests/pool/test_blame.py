"""Whose error is the cause."""

from __future__ import annotations

from gpupool.core.errors import RankError, SpmdError
from gpupool.pool.blame import freed_by_a_death

LOST = "[pair.cc:561] Connection closed by peer [127.0.0.1]:4321. GLHF!"


def settled(*errors: RankError) -> SpmdError:
    found = {error.rank: error for error in errors}
    return SpmdError({**found, **freed_by_a_death(found)}, 3)


def test_a_death_is_the_cause_though_its_peers_noticed_it_before_it_was_told() -> None:
    lost = [RankError(rank, "RuntimeError", LOST, failed_at=1.0) for rank in (0, 2)]
    error = settled(*lost, RankError(1, "EngineDiedError", "killed", failed_at=2.0))
    assert error.first.rank == 1
    assert [one.freed for one in error.errors.values()] == [True, False, True]


def test_what_follows_from_a_lost_connection_is_not_its_cause() -> None:
    lost = RankError(0, "RuntimeError", LOST, failed_at=1.0)
    error = settled(lost, RankError(1, "KeyboardInterrupt", "", failed_at=2.0))
    assert error.first == lost


def test_other_errors_stay_as_they_are() -> None:
    errors = [RankError(0, "RuntimeError", "timeout", failed_at=1.0), RankError(1, "KeyError", "x")]
    assert list(settled(*errors).errors.values()) == errors
