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
_SILENT_S = 5.0  # who does not answer for so long may have left its collective
_MOVED_S = 1e-3  # of a processor: more than a thread needs that only waits


@dataclass(slots=True)
class _Watched(Observed):
    """What is remembered of a rank between two looks."""

    ran_at: float = 0.0  # when its process was not stopped, the last time
    same_since: float = 0.0
    same: object = None  # what it is the same since: over, or in which collective
    asked_at: float = 0.0
    answer: Future[Answer[Location]] | None = None
    has_moved: bool = False  # since the last look: it computes, or is in another one by now


class HangWatch:
    """Watches one call on some ranks of a pool. Used by one thread.

    `where` has the last answer of each rank of the pool.
    """

    def __init__(self, all_ranks: Ranks, ranks: Sequence[int], hang_after_s: float) -> None:
        self._all_ranks = all_ranks
        self._ranks = frozenset(ranks)
        self._hang_after_s = hang_after_s
        self._next_at = time.monotonic() + min(_FIRST_S, hang_after_s / 2)
        self._every_s = min(_EVERY_S, hang_after_s / 4)
        self._all: dict[int, _Watched] = {}
        self._diagnosis: Diagnosis | None = None

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
        if left and self._every_s > _HURRY_S:  # who waits for one of these is to hear of it soon
            self._next_at, self._every_s = now, _HURRY_S
        for one in self._all.values():
            if one.answer is not None and one.answer.done():
                self._take(one, one.answer.result().found)
        if now >= self._next_at:
            self._next_at = now + self._every_s
            with contextlib.suppress(Exception):  # the pool is being stopped: nothing to report
                self._ask(now)
            for rank, one in self._all.items():
                one.finished, one.left = rank in finished, rank in left
                self._count(one, now)
            self._diagnosis = diagnose(self._all, self._hang_after_s)
        return self._diagnosis

    def _ask(self, now: float) -> None:
        pids, ranks = self._all_ranks.engines.pids, self._all_ranks.placement.ranks
        for rank, pid in pids.items():
            if rank not in self._all or self._all[rank].pid != pid:  # it has been replaced
                runs_it, host = rank in self._ranks, ranks[rank].host
                self._all[rank] = _Watched(pid=pid, runs_it=runs_it, host=host)
        for rank, one in self._all.items():
            if one.host or rank not in pids or state_of(one.pid) != "T":  # of this machine alone
                one.ran_at = now
        free = [rank for rank, one in self._all.items() if one.answer is None]
        for rank, answer in self._all_ranks.engines.control(Where(glance=True), free).items():
            self._all[rank].answer, self._all[rank].asked_at = answer, now

    def _take(self, one: _Watched, found: Location | None) -> None:
        one.answer = None
        if found is not None:
            if one.where is not None and not found.queued:  # who waits for a device may spin
                one.has_moved |= found.cpu_s - one.where.cpu_s > _MOVED_S
            one.where = found

    def _count(self, one: _Watched, now: float) -> None:
        if one.where is not None and one.answer is not None and now - one.asked_at > _SILENT_S:
            one.where = replace(one.where, collective=None)
        one.stopped_s = now - one.ran_at
        same = one.is_over, one.inside.key if one.inside else None
        if same != one.same or (one.inside and one.has_moved):
            one.same, one.same_since = same, now
        one.has_moved = False
        one.same_s = now - one.same_since
