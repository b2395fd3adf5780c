"""Looks now and then where the ranks of a call are, and says what is wrong. Runs on the client.

A rank in a collective waits for the members that have not come to it. It hangs if one of them never
comes: it is over, stopped, or in another collective while nobody is outside of one. It also hangs
if all have come, and others have left it long ago: they have not called it alike. Whoever is in no
collective may still come to one: that is told, and is no hang.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpupool.core.formatting import format_ranks
from gpupool.core.machine.processes import state_of
from gpupool.core.wire.location import Collective, Location
from gpupool.core.wire.requests import Answer, Where
from gpupool.pool.ranks import Ranks

_FIRST_S = 2.0  # a short cell costs nothing
_EVERY_S = 1.0
_HURRY_S = 0.2  # when a rank has left on purpose
_SILENT_S = 5.0  # who does not answer for so long may have left its collective
_MOVED_S = 1e-3  # of a processor: more than a thread needs that only waits
_STOPPED_S = 5.0  # a process that stands still so long is reported
_LEFT_S = 0.5  # instead of `hang_after_s`, where a rank has left on purpose
_UNKNOWN = Location()
_ADVICE = "Interrupt (■) to stop all of them; variables are kept."


class Place(NamedTuple):
    """What some ranks of a host do at a moment: "in barrier", and the line of the user's code."""

    ranks: tuple[int, ...]
    doing: str
    line: str
    host: str = ""


class Diagnosis(str):
    """What is wrong, as it is told while it lasts, and its parts for those who can draw a table.

    `head` says what is wrong, `places` where each rank is, `advice` what can be done; `finding` is
    what an error says of it. `is_hang`: it cannot end without help. `by_exit`: it hangs since a
    rank has left the cell.
    """

    head = advice = finding = ""
    places: tuple[Place, ...] = ()
    is_hang = by_exit = False


class HangWatch:
    """Watches one call on some ranks of a pool. Used by one thread."""

    def __init__(self, all_ranks: Ranks, ranks: Sequence[int]) -> None:
        self._all_ranks, self._ranks = all_ranks, frozenset(ranks)
        self._hang_after_s = hang_after_s = all_ranks.options.hang_after_s
        self._next_at = time.monotonic() + min(_FIRST_S, hang_after_s / 2)
        self._every_s = min(_EVERY_S, hang_after_s / 4)
        self._all: dict[int, Observed] = {}
        self._diagnosis: Diagnosis | None = None

    @property
    def where(self) -> dict[int, Location]:
        """Where each rank of the pool was when it answered last."""
        # As a list: another thread asks, which shows it, while ranks may be replaced.
        return {rank: one.where for rank, one in list(self._all.items())}

    def look(
        self, finished: Collection[int], now: float, left: Collection[int] = ()
    ) -> Diagnosis | None:
        """What is wrong at this moment. Never waits; to be called some times a second.

        Ranks in `finished` have ended the call, those in `left` by `exit()`.
        """
        if left and self._every_s > _HURRY_S:  # who waits for one of these is to hear of it soon
            self._next_at, self._every_s = now, _HURRY_S
        for one in self._all.values():
            if one.answer is not None and one.answer.done():
                found, one.answer = one.answer.result().found, None
                if found is not None:
                    if not found.queued:  # who waits for a device may spin
                        one.has_moved |= found.cpu_s - one.where.cpu_s > _MOVED_S
                    one.where = found
        if now >= self._next_at:
            self._next_at = now + self._every_s
            with contextlib.suppress(Exception):  # the pool is being stopped: nothing to report
                self._ask(now)
            for rank, one in self._all.items():
                one.finished, one.left = rank in finished, rank in left
                one.count(now)
            self._diagnosis = diagnose(self._all, self._hang_after_s)
        return self._diagnosis

    def _ask(self, now: float) -> None:
        pids, ranks = self._all_ranks.engines.pids, self._all_ranks.placement.ranks
        for rank, pid in pids.items():
            if rank not in self._all or self._all[rank].pid != pid:  # it has been replaced
                runs_it, host = rank in self._ranks, ranks[rank].host
                self._all[rank] = Observed(pid=pid, runs_it=runs_it, host=host)
        for rank, one in self._all.items():
            if one.host or rank not in pids or state_of(one.pid) != "T":  # of this machine alone
                one.ran_at = now
        free = [rank for rank, one in self._all.items() if one.answer is None]
        for rank, answer in self._all_ranks.engines.control(Where(glance=True), free).items():
            self._all[rank].answer, self._all[rank].asked_at = answer, now


@dataclass(slots=True)
class Observed:
    """What is known of one rank that takes part, or is waited for.

    `where` is its last answer. `same_s`: seconds in the same collective, or since it is over;
    `stopped_s`: since its process was stopped, by SIGSTOP. `finished`: it has ended the cell;
    `left`: by `exit()` or `sys.exit()`; `runs_it`: it has begun it. `host`: "" where all ranks are
    on the notebook's.
    """

    where: Location = _UNKNOWN
    finished: bool = False
    left: bool = False
    runs_it: bool = True
    same_s: float = 0.0
    stopped_s: float = 0.0
    pid: int = 0
    host: str = ""
    # what the watch remembers from look to look
    ran_at: float = 0.0  # when its process was not stopped, the last time
    same_since: float = 0.0
    same: object = None  # what it is the same since: over, or in which collective
    asked_at: float = 0.0
    answer: Future[Answer[Location]] | None = None
    has_moved: bool = False  # since the last look: it computes, or is in another one by now

    def count(self, now: float) -> None:
        if self.answer is not None and now - self.asked_at > _SILENT_S:
            self.where = replace(self.where, collective=None)
        self.stopped_s = now - self.ran_at
        same = self.is_over, self.inside.key if self.inside else None
        if same != self.same or (self.inside and self.has_moved):
            self.same, self.same_since = same, now
        self.has_moved = False
        self.same_s = now - self.same_since

    @property
    def is_over(self) -> bool:
        """Whether nothing runs on it that could come to a collective."""
        return self.finished or (not self.runs_it and self.where.idle)

    @property
    def inside(self) -> Collective | None:
        """The collective it waits in."""
        return None if self.is_over else self.where.collective

    @property
    def is_stopped(self) -> bool:
        return self.stopped_s >= _STOPPED_S

    def is_in(self, collective: Collective) -> bool:
        """Whether its part of this one is under way, also if it does not wait for it."""
        return self.where.collective is not None and self.where.collective.matches(collective)

    def calls(self) -> list[tuple[Collective, float]]:
        """The collectives that are known of it, the one it is in first, and how long ago."""
        now = [(self.where.collective, self.same_s)] if self.where.collective else []
        return [*now, *((one, one.since_s) for one in self.where.last)]

    def came_s(self, collective: Collective) -> float | None:
        """How long ago it came to this collective, or to a later one; None if it has not come."""
        later = None
        for one, seconds in self.calls():
            if one.matches(collective):
                return seconds
            if one.group == collective.group and 0 < collective.number <= one.number:
                if one.number == collective.number:
                    return None  # it has called another one instead
                later = seconds if later is None else later
        return later


def diagnose(seen: Mapping[int, Observed], hang_after_s: float) -> Diagnosis | None:
    """What the user should know of these ranks; None if all is well as far as can be seen."""
    nobody_moves = all(
        one.is_over or one.is_stopped or (one.inside and one.same_s >= hang_after_s)
        for one in seen.values()
        if one.runs_it
    )
    late: dict[int, list[int]] = {}  # who has not come to the collective of a rank
    lasting, hanging, by_exit = list[int](), list[int](), False
    for rank, here in seen.items():
        if (collective := here.inside) is None:
            continue
        others = [other for other in collective.ranks if other != rank and other in seen]
        came = {other: seen[other].came_s(collective) for other in others}
        late[rank] = [other for other, s in came.items() if s is None]
        those = [seen[other] for other in late[rank]]
        was_left = any(one.left for one in those)
        limit_s = min(_LEFT_S, hang_after_s) if was_left else hang_after_s
        if here.same_s < limit_s:
            continue
        lasting.append(rank)
        never = any(one.is_stopped or (one.is_over and one.same_s >= limit_s) for one in those)
        if never or (nobody_moves and any(one.inside for one in those)):
            hanging.append(rank)
            by_exit |= was_left
        # For a moment one is through it before another, as it must be.
        is_alone = any(not seen[other].is_in(collective) for other in others)
        if is_alone and all(s is not None and s >= hang_after_s for s in came.values()):
            return _of_one_collective(rank, seen, is_hang=True)  # it may be why others wait
    waiting = hanging or [rank for rank in lasting if late[rank]]
    stopped = [rank for rank, one in seen.items() if one.is_stopped and not one.finished]
    if not waiting and stopped:
        return _told(_stopped_text(stopped, seen).removesuffix("."), {})
    if not waiting:
        return _of_one_collective(lasting[0], seen, is_hang=False) if lasting else None
    involved = sorted({*waiting, *(other for rank in waiting for other in late[rank])})
    inside = [rank for rank in involved if late.get(rank)]
    outside = [rank for rank in involved if rank not in inside]
    head = "the ranks have been in different collectives"
    if outside:
        have = "have" if len(inside) > 1 else "has"
        head = f"{_ranks(inside)} {have} been waiting for {_ranks(outside)}"
    return _told(
        f"{head} for {max(seen[rank].same_s for rank in inside):.0f} s",
        {rank: _place(seen[rank]) for rank in (*inside, *outside)},
        is_hang=bool(hanging),
        by_exit=by_exit,
        more=_stopped_text([rank for rank in stopped if rank in involved], seen),
    )


# ---- the words -------------------------------------------------------------------------------


def _told(
    head: str,
    places: Mapping[int, Place],
    *,
    is_hang: bool = False,
    by_exit: bool = False,
    more: str = "",
) -> Diagnosis:
    # those of a host that do the same at the same line stand together
    groups: dict[Place, tuple[int, ...]] = {}
    for rank, place in places.items():
        groups[place] = (*groups.get(place, ()), rank)
    together = tuple(place._replace(ranks=ranks) for place, ranks in groups.items())
    listed = f": {'; '.join(map(_sentence, together))}" if together else ""
    begin = f"Hang: {head}" if is_hang else head[0].upper() + head[1:]
    advice = _ADVICE if is_hang and not more else ""
    told = Diagnosis(f"{begin}{listed}. {more or advice}".rstrip())
    told.head, told.places, told.advice = f"{begin}. {more}".rstrip(), together, advice
    told.finding, told.is_hang, told.by_exit = head + listed, is_hang, by_exit
    return told


def _of_one_collective(rank: int, seen: Mapping[int, Observed], *, is_hang: bool) -> Diagnosis:
    """What is said of a collective that all have come to, and that does not end for this rank."""
    collective = seen[rank].inside
    assert collective is not None
    places, sizes = dict[int, Place](), set[str]()
    for other in sorted({rank, *collective.ranks} & seen.keys()):
        one = seen[other]
        values = next((call.values for call, _ in one.calls() if call.matches(collective)), "")
        sizes |= {values} - {""}
        done = [f"with {values}"] * bool(values) + ["through it"] * (not one.is_in(collective))
        places[other] = _place(one)._replace(doing=", and ".join(done), line=one.where.spot)
    op, seconds = collective.op, f"{seen[rank].same_s:.0f} s"
    if not is_hang:
        more = "It is slow, or they have called it with different sizes, sources or operations."
        head = f"all that take part have been in {op} for {seconds}"
        return _told(head, places, more=more)
    how = f"not called {op} alike"
    if len(sizes) > 1:
        how = f"called {op} with tensors that do not go together"
    return _told(f"the ranks have {how}, {seconds} ago", places, is_hang=True)


def _ranks(ranks: Iterable[int]) -> str:
    """ "rank 1", "ranks 0, 2 and 3", "ranks 0-7"."""
    listed = format_ranks(ranks)
    before, _, last = listed.rpartition(", ")
    many = "s" * (bool(before) or "-" in last)
    return f"rank{many} {before} and {last}" if before else f"rank{many} {last}"


def _place(one: Observed) -> Place:
    """In which collective a rank is, or why it is in none, and its line."""
    why = ""
    if one.left:
        why = "has left the cell by exit() or sys.exit()"
    elif one.is_over:
        why = "has already finished the cell" if one.finished else "does not run this cell"
    elif one.is_stopped:
        why = "is not responding"
    if why:
        return Place((), why, "", one.host)
    doing, spot = one.where.doing, one.where.spot
    return Place((), f"in {doing}" if doing else "elsewhere" * (not spot), spot, one.host)


def _sentence(place: Place) -> str:
    """ "ranks 0, 2 and 3 in barrier (Cell In[19], line 3)"."""
    ranks, doing, line, host = place
    at = f" ({line})" if doing else f"at {line}"
    return f"{_ranks(ranks)}{f' ({host})' * bool(host)} {doing}{at if line else ''}"


def _stopped_text(ranks: Iterable[int], seen: Mapping[int, Observed]) -> str:
    return " ".join(
        f"Rank {rank} has been stopped for {seen[rank].stopped_s:.0f} s: `kill -CONT "
        f"{seen[rank].pid}` resumes it. To interrupt (■), or `%gpupool restart {rank}` for a cell "
        "in the background, replaces it: its variables are lost then."
        for rank in ranks
    )
