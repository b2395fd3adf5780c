"""From what the ranks of a call answered to what is said of it: who failed, and who was freed.

Runs on the client.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from gpupool.core.errors import RankError
from gpupool.core.wire.location import Location
from gpupool.core.wire.masking import Secrets, redact
from gpupool.core.wire.replies import Raised

HANG = "HangError"
_REFUSALS = ("TypeError", "ValueError")  # of a collective that has not begun


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank failed.

    `collective`: in a collective that had begun, which means that the group is of no use any more.
    `interrupted`: by a KeyboardInterrupt.
    """

    error: RankError
    collective: bool = False
    interrupted: bool = False

    @classmethod
    def of_call(cls, rank: int, failure: BaseException, hidden: Secrets) -> Failure:
        """Of a call that has no reply: the engine died, or did not run our function at all."""
        text = redact(str(failure), hidden)  # the end of a log may hold anything
        name = type(failure).__name__
        failed_at = getattr(failure, "died_at", None) or time.time()
        return cls(RankError(rank, name, text, failed_at=failed_at))

    @classmethod
    def of(cls, raised: Raised, hidden: Secrets) -> Failure:
        """Of a call that has raised something."""
        error = raised.error
        error = replace(
            error,
            evalue=redact(error.evalue, hidden),
            traceback=redact(error.traceback, hidden),
            where=redact(error.where, hidden),
            hint=redact(error.hint, hidden),
        )
        collective = raised.collective and error.ename not in _REFUSALS
        return cls(error, collective, error.ename == "KeyboardInterrupt")


def resolve(
    failures: Mapping[int, Failure],
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
        limit: (name of the error, what it says) of the limit, if that was it.
        freed_at: when ranks were first interrupted or their collectives aborted (seconds since the
            epoch), if they were.
        where: where ranks were before they were interrupted or killed, as far as is known.
    """
    causes = set(_causes(failures.values(), asked, freed_at))
    places = {rank: where.get(rank, Location()) for rank in failures}
    waited = {rank for rank, one in failures.items() if one.collective or places[rank].doing}
    # whoever waits in a collective is not who the others wait for, if one of them is elsewhere
    freed = waited if waited != failures.keys() - causes else set()
    resolved = {}
    for rank, failure in failures.items():
        error, was = failure.error, places[rank]
        if rank in causes or not (failure.collective or failure.interrupted):
            resolved[rank] = error if error.where else replace(error, was=was.was)
        elif asked and rank not in freed:
            resolved[rank] = _interrupted(failure, limit, was)
        else:
            resolved[rank] = replace(error, freed=True, was=was.was)
    return resolved


def _causes(failures: Iterable[Failure], asked: bool, freed_at: float | None) -> list[int]:
    """The ranks that failed by themselves."""
    by_time = sorted(failures, key=lambda f: (f.error.failed_at, f.error.rank))
    own = [f.error.rank for f in by_time if not (f.collective or f.interrupted)]
    if own or asked:
        return own
    # nothing but failed collectives: those that nobody had freed, or the first
    unprovoked = [f.error.rank for f in by_time if freed_at is None or f.error.failed_at < freed_at]
    return unprovoked or [by_time[0].error.rank]


def _interrupted(failure: Failure, limit: tuple[str, str] | None, was: Location) -> RankError:
    """The error of a rank that was interrupted on request, maybe in a collective."""
    error = failure.error
    if was.doing:
        error = replace(error, ename="KeyboardInterrupt", evalue=f"in {was.doing}")
    elif failure.collective:  # C++ code raises its own error and not the interrupt
        error = replace(error, ename="KeyboardInterrupt", evalue="in a collective")
    if limit is None:
        return replace(error, by_user=True, was=was.was)
    name, words = limit
    return replace(
        error,
        ename=name,
        # a hang was reported with the place of every rank
        evalue=words if name == HANG else ", ".join(filter(None, (words, error.evalue))),
        traceback=error.traceback.replace("KeyboardInterrupt", name),
    )
