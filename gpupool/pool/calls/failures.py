"""From what the ranks of a call answered to what is said of it: who failed, and who was freed.

Runs on the client.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpupool.core.errors import RankError
from gpupool.core.wire.location import Location
from gpupool.core.wire.masking import Secrets, redact
from gpupool.core.wire.replies import Raised

HANG = "HangError"
_INTERRUPT = "KeyboardInterrupt"
_REFUSALS = ("TypeError", "ValueError")  # of a collective that has not begun


def without_reply(rank: int, failure: BaseException, hidden: Secrets) -> Raised:
    """What ended a call that has no reply: the engine died, or did not run our function at all."""
    text = redact(str(failure), hidden)  # the end of a log may hold anything
    at = getattr(failure, "died_at", None) or time.time()
    return Raised(RankError(rank, type(failure).__name__, text, failed_at=at))


def masked(raised: Raised, hidden: Secrets) -> Raised:
    shown = ("evalue", "traceback", "where", "hint")
    texts: dict[str, Any] = {name: redact(getattr(raised.error, name), hidden) for name in shown}
    error = replace(raised.error, **texts)
    return Raised(error, raised.collective and error.ename not in _REFUSALS)


def resolve(
    failures: Mapping[int, Raised],
    *,
    asked: bool,
    limit: tuple[str, str] | None,
    freed_at: float | None,
    where: Mapping[int, Location],
) -> dict[int, RankError]:
    """What is said of each rank, now that all have ended.

    Ranks that failed only because of another one are marked as freed: after a first failure those
    that were interrupted or in a collective. If the user wanted the end these were interrupted, but
    for those in a collective that waited for one that was elsewhere.

    Args:
        asked: the user, or a limit, wanted the end.
        limit: (name of the error, what it says), if it was a limit.
        freed_at: when ranks were first interrupted or their collectives aborted (seconds since the
            epoch), if they were.
        where: where ranks were before they were interrupted or killed, as far as is known.
    """
    causes = _causes(failures, asked, freed_at)
    places = {rank: where.get(rank, Location()) for rank in failures}
    waited = {rank for rank, one in failures.items() if one.collective or places[rank].doing}
    # whoever waits in a collective is not who the others wait for, if one of them is elsewhere
    freed = waited if waited != failures.keys() - causes else set()
    resolved = {}
    for rank, failure in failures.items():
        error, was = failure.error, places[rank]
        if rank in causes:
            resolved[rank] = error if error.where else replace(error, was=was.was)
        elif asked and rank not in freed:
            resolved[rank] = _interrupted(failure, limit, was)
        else:
            resolved[rank] = replace(error, freed=True, was=was.was)
    return resolved


def _causes(failures: Mapping[int, Raised], asked: bool, freed_at: float | None) -> set[int]:
    """The ranks that failed by themselves."""
    at = {rank: one.error.failed_at for rank, one in failures.items()}
    own = {n for n in at if not failures[n].collective and failures[n].error.ename != _INTERRUPT}
    if own or asked or not failures:
        return own
    # nothing but failed collectives: those that nobody had freed, or the first
    unprovoked = {rank for rank in at if freed_at is None or at[rank] < freed_at}
    return unprovoked or {min(at, key=lambda rank: (at[rank], rank))}


def _interrupted(failure: Raised, limit: tuple[str, str] | None, was: Location) -> RankError:
    """The error of a rank that was interrupted on request, maybe in a collective."""
    error = failure.error
    if was.doing or failure.collective:  # C++ code raises its own error and not the interrupt
        error = replace(error, ename=_INTERRUPT, evalue=f"in {was.doing or 'a collective'}")
    if limit is None:
        return replace(error, by_user=True, was=was.was)
    name, words = limit
    return replace(
        error,
        ename=name,
        # a hang was reported with the place of every rank
        evalue=words if name == HANG else ", ".join(filter(None, (words, error.evalue))),
        traceback=error.traceback.replace(_INTERRUPT, name),
    )
