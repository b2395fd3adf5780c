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
from gpupool.pool.calls.diagnosis import Diagnosis, Observed, diagnose
from gpupool.pool.ranks import Ranks

_FIRST_S = 2.0  # a short cell costs nothing
_EVERY_S = 1.0
_HURRY_S = 0.2  # when a rank has left on purpose
_MOVED_S = 1e-3  # of a processor: more than a thread needs that only waits


@dataclass
class _Rank:
    """What is remembered of a rank between two looks."""

    pid: int
    same_since: float
    state_since: float
    state: str = "S"
    asked_at: float = 0.0
    answer: Future[Answer[Location]] | None = None
    where: Location | None = None
    is_over: bool = False
    inside: tuple[str, int, str] | None = None  # the key of its collective
    has_moved: bool = False  # since it was looked at: it computes, or is in another one by now


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
        now = time.monotonic() if started is None else started
        self._next_at = now + min(_FIRST_S, hang_after_s / 2)
        self._every_s = min(_EVERY_S, hang_after_s / 4)
        self._all: dict[int, _Rank] = {}
        self._diagnosis: Diagnosis | None = None
        self._hurries = False

    @property
    def where(self) -> dict[int, Location]:
        """Rank -> its last answer."""
        # As a list: another thread asks, which shows it, while ranks may be replaced.
        ranks = list(self._all.items())
        return {rank: one.where for rank, one in ranks if one.where is not None}

    def look(
        self, finished: Collection[int], now: float, left: Collection[int] = ()
    ) -> Diagnosis | None:
        """What is wrong at this moment. Never waits; to be called some times a second.

        Args:
            finished: the ranks that have ended the call.
            now: `time.monotonic()`.
            left: those of them that have left it by `exit()`.
        """
        if left and not self._hurries:  # who waits for one of these is to hear of it soon
            self._hurries, self._next_at, self._every_s = True, now, _HURRY_S
        for one in self._all.values():
            if one.answer is not None and one.answer.done():
                self._take(one)
        if now >= self._next_at:
            self._next_at = now + self._every_s
            with contextlib.suppress(Exception):  # the pool is being stopped: nothing to report
                self._ask(now)
            seen = {rank: self._observed(rank, finished, left, now) for rank in self._all}
            self._diagnosis = diagnose(seen, self._hang_after_s)
        return self._diagnosis

    def _ask(self, now: float) -> None:
        for rank, pid in self._all_ranks.engines.pids.items():
            one = self._all.get(rank)
            if one is None or one.pid != pid:  # it has been replaced
                one = self._all[rank] = _Rank(pid, now, now)
            state = state_of(pid)
            if state != one.state:
                one.state, one.state_since = state, now
        free = [rank for rank, one in self._all.items() if one.answer is None]
        near_s = 0.0 if self._hurries else self._hang_after_s / 2
        is_near = any(o.inside and now - o.same_since >= near_s for o in self._all.values())
        for rank, answer in self._all_ranks.ask(Where(glance=not is_near), free).items():
            self._all[rank].answer, self._all[rank].asked_at = answer, now

    def _take(self, one: _Rank) -> None:
        assert one.answer is not None
        found, one.answer = one.answer.result().found, None
        if found is None:
            return
        if one.where is not None and not found.queued:  # who waits for a device may spin
            one.has_moved |= found.cpu_s - one.where.cpu_s > _MOVED_S
        one.where = found

    def _observed(
        self, rank: int, finished: Collection[int], left: Collection[int], now: float
    ) -> Observed:
        one = self._all[rank]
        seen = Observed(
            where=one.where,
            finished=rank in finished,
            left=rank in left,
            runs_it=rank in self._ranks,
            silent_s=now - one.asked_at if one.answer is not None else 0.0,
            state=one.state,
            frozen_s=now - one.state_since,
            pid=one.pid,
        )
        inside = seen.inside.key if seen.inside is not None else None
        if (seen.is_over, inside) != (one.is_over, one.inside) or (inside and one.has_moved):
            one.is_over, one.inside, one.same_since = seen.is_over, inside, now
        one.has_moved = False
        return replace(seen, same_s=now - one.same_since)
