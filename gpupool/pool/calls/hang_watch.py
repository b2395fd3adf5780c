"""Looks now and then where the ranks of a call are, and reports what is wrong. On the client."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from gpupool.core.machine.processes import state_of
from gpupool.core.wire.location import Location
from gpupool.core.wire.requests import Answer, Where
from gpupool.pool.calls.diagnosis import Diagnosis, Observed, diagnose, left_behind
from gpupool.pool.ranks import Ranks

__all__ = ["Diagnosis", "HangWatch", "diagnose"]

_FIRST_S = 2.0  # a short cell costs nothing
_EVERY_S = 1.0
_HURRY_S = 0.2  # when a rank has left on purpose
_COMPUTES = 0.02  # of a processor, between two answers: also on a machine that is full
_MOVED_S = 1e-3  # of a processor: more than a thread needs that only waits


@dataclass
class _Rank:
    """What is remembered of a rank between two looks."""

    pid: int
    asked_at: float = 0.0
    answer: Future[Answer[Location]] | None = None
    where: Location | None = None
    answered_at: float = 0.0
    same_since: float = 0.0
    computes: bool = False
    state: str = "S"
    state_since: float = 0.0


class HangWatch:
    """Watches one call on some ranks of a pool. Used by one thread.

    `where` has the last answer of each rank of the pool.
    """

    def __init__(
        self,
        all_ranks: Ranks,
        ranks: Sequence[int],
        hang_after_s: float,
        started: float | None = None,
    ) -> None:
        self._all_ranks = all_ranks
        self._ranks = frozenset(ranks)
        self._hang_after_s = hang_after_s
        self._started = now = time.monotonic() if started is None else started
        self._next_at = now + min(_FIRST_S, hang_after_s / 2)
        self._every_s = min(_EVERY_S, hang_after_s / 4)
        self._all: dict[int, _Rank] = {}
        self._diagnosis: Diagnosis | None = None
        self._hurries = False
        self._behind: dict[object, float] = {}  # rank and its collective -> since when it is behind

    @property
    def where(self) -> dict[int, Location]:
        """Rank -> its last answer."""
        # As a list: another thread asks, which shows it, while ranks may be replaced.
        ranks = list(self._all.items())
        return {rank: one.where for rank, one in ranks if one.where is not None}

    def look(
        self,
        pending: Collection[int],
        finished: Collection[int],
        now: float,
        left: Collection[int] = (),
    ) -> Diagnosis | None:
        """What is wrong at this moment. Never waits; to be called some times a second.

        Args:
            pending: the ranks that still run the call.
            finished: those that have ended it.
            now: `time.monotonic()`.
            left: those of them that have left it by `exit()`.
        """
        if left and not self._hurries:  # who waits for one of these is to hear of it soon
            self._hurries, self._next_at, self._every_s = True, now, _HURRY_S
        for one in self._all.values():
            if one.answer is not None and one.answer.done():
                self._take(one, now)
        if now >= self._next_at:
            self._next_at = now + self._every_s
            with contextlib.suppress(Exception):  # the pool is being stopped: nothing to report
                self._ask(now)
            seen = {rank: self._observed(rank, finished, left, now) for rank in self._all}
            seen = self._with_behind(seen, now)
            self._diagnosis = diagnose(seen, self._hang_after_s) if pending else None
        return self._diagnosis

    def _with_behind(self, seen: dict[int, Observed], now: float) -> dict[int, Observed]:
        """The same, with how long ranks have been in a collective that others have left."""
        inside = {rank: (rank, seen[rank].inside) for rank in left_behind(seen)}
        keys = {rank: (r, c and (c.op, c.seq, c.group)) for rank, (r, c) in inside.items()}
        self._behind = {key: self._behind.get(key, now) for key in keys.values()}
        return seen | {
            rank: replace(seen[rank], behind_s=now - self._behind[key])
            for rank, key in keys.items()
        }

    def _ask(self, now: float) -> None:
        for rank, pid in self._all_ranks.engines.pids.items():
            one = self._all.get(rank)
            if one is None or one.pid != pid:  # it has been replaced
                one = self._all[rank] = _Rank(pid, same_since=now, state_since=now)
            state = state_of(pid)
            if state != one.state:
                one.state, one.state_since = state, now
        free = [rank for rank, one in self._all.items() if one.answer is None]
        near = any(now - one.same_since >= self._hang_after_s / 2 for one in self._all.values())
        request = Where(history=True) if near or self._hurries else Where(glance=True)
        for rank, answer in self._all_ranks.ask(request, free).items():
            self._all[rank].answer, self._all[rank].asked_at = answer, now

    def _take(self, one: _Rank, now: float) -> None:
        assert one.answer is not None
        found = one.answer.result().found
        one.answer = None
        if found is None:
            return
        before, one.where = one.where, found
        used_s = found.cpu_s - before.cpu_s if before else 0.0
        one.computes = used_s > _COMPUTES * (now - one.answered_at)
        one.answered_at = now
        if not _is_same(before, found, used_s):
            one.same_since = now

    def _observed(
        self, rank: int, finished: Collection[int], left: Collection[int], now: float
    ) -> Observed:
        one = self._all[rank]
        return Observed(
            where=one.where,
            finished=rank in finished,
            left=rank in left,
            runs_it=rank in self._ranks,
            same_s=now - one.same_since if one.where and one.where.collective else 0.0,
            silent_s=now - one.asked_at if one.answer is not None else 0.0,
            state=one.state,
            frozen_s=now - one.state_since if one.state in ("T", "t", "D") else 0.0,
            pid=one.pid,
            computes=one.computes,
        )


def _is_same(before: Location | None, now: Location, used_s: float) -> bool:
    """Whether a rank is still in the same collective; without a number a pause decides."""
    was, collective = before.collective if before else None, now.collective
    if was is None or collective is None:
        return False
    if (was.op, was.seq, was.group) != (collective.op, collective.seq, collective.group):
        return False
    return bool(collective.seq) or used_s < _MOVED_S
