"""Whether ranks hang, and what is said of it. Pure functions; runs on the client.

A rank in a collective waits for the members that have not come to it. It hangs if one of them never
comes: it is over, stopped, or in another collective while nobody is outside of one. It also hangs
if all have come, and others have left it long ago: they have not called it alike. Whoever is in no
collective may still come to one: that is told, and is no hang.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpupool.core.formatting import format_ranks
from gpupool.core.wire.location import Collective, Location
from gpupool.pool.notices import Notice, Place

_STOPPED_S = 5.0  # a process that stands still so long is reported
_LEFT_S = 0.5  # instead of `hang_after_s`, where a rank has left on purpose
_ADVICE = "Interrupt (■) to stop all of them; variables are kept."

Words = tuple[str, str, str]  # what a rank does, its line, and its host


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong: `finding` in words, for an error, and the `notice` while it lasts.

    `is_hang`: it cannot end without help. `by_exit`: it hangs since a rank has left the cell.
    """

    finding: str
    notice: Notice
    is_hang: bool = False
    by_exit: bool = False


@dataclass(slots=True)
class Observed:
    """What is known of one rank that takes part, or is waited for.

    `where` is its last answer, None before the first. `same_s`: seconds in the same collective, or
    since it is over; `stopped_s`: since its process was stopped, by SIGSTOP. `finished`: it has
    ended the cell; `left`: by `exit()` or `sys.exit()`; `runs_it`: it has begun it. `host`: ""
    where all ranks are on the notebook's.
    """

    where: Location | None = None
    finished: bool = False
    left: bool = False
    runs_it: bool = True
    same_s: float = 0.0
    stopped_s: float = 0.0
    pid: int = 0
    host: str = ""

    @property
    def is_over(self) -> bool:
        """Whether nothing runs on it that could come to a collective."""
        return self.finished or (not self.runs_it and self.where is not None and self.where.idle)

    @property
    def pending(self) -> Collective | None:
        """The collective that it has begun."""
        return self.where.collective if self.where else None

    @property
    def inside(self) -> Collective | None:
        """The collective it waits in."""
        return None if self.is_over else self.pending

    @property
    def is_stopped(self) -> bool:
        """Whether it stands still until somebody makes it go on."""
        return self.stopped_s >= _STOPPED_S

    def is_in(self, collective: Collective) -> bool:
        """Whether its part of this collective is under way, also if it does not wait for it."""
        return self.pending is not None and self.pending.matches(collective)

    def calls(self) -> list[tuple[Collective, float]]:
        """The collectives that are known of it, the one it is in first, and how long ago."""
        now = [(self.pending, self.same_s)] if self.pending else []
        return [*now, *((one, one.since_s) for one in (self.where.last if self.where else ()))]

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
    waits = {rank: one.inside for rank, one in seen.items() if one.inside}
    nobody_moves = all(
        one.is_over or one.is_stopped or (rank in waits and one.same_s >= hang_after_s)
        for rank, one in seen.items()
        if one.runs_it
    )
    late: dict[int, list[int]] = {}  # who has not come to the collective of a rank
    lasting, hanging, by_exit = list[int](), list[int](), False
    for rank, collective in waits.items():
        others = [other for other in collective.ranks if other != rank and other in seen]
        came = {other: seen[other].came_s(collective) for other in others}
        late[rank] = [other for other, s in came.items() if s is None]
        was_left = any(seen[other].left for other in late[rank])
        limit_s = min(_LEFT_S, hang_after_s) if was_left else hang_after_s
        if seen[rank].same_s < limit_s:
            continue
        lasting.append(rank)
        ended = [one for other in late[rank] if (one := seen[other]).is_over]
        if (
            any(one.same_s >= limit_s for one in ended)
            or any(seen[other].is_stopped for other in late[rank])
            or (nobody_moves and not waits.keys().isdisjoint(late[rank]))
        ):
            hanging.append(rank)
            by_exit |= was_left
        # For a moment one is through it before another, as it must be.
        is_alone = any(not seen[other].is_in(collective) for other in others)
        if is_alone and all(s is not None and s >= hang_after_s for s in came.values()):
            return _of_one_collective(rank, seen, is_hang=True)  # it may be why others wait
    waiting = hanging or [rank for rank in lasting if late[rank]]
    stopped = [rank for rank, one in seen.items() if one.is_stopped and not one.finished]
    if not waiting and stopped:
        return _diagnosis(_stopped_text(stopped, seen).removesuffix("."), {})
    if not waiting:
        return _of_one_collective(lasting[0], seen, is_hang=False) if lasting else None
    involved = sorted({*waiting, *(other for rank in waiting for other in late[rank])})
    inside = [rank for rank in involved if late.get(rank)]
    outside = [rank for rank in involved if rank not in inside]
    head = "the ranks have been in different collectives"
    if outside:
        have = "have" if len(inside) > 1 else "has"
        head = f"{_ranks(inside)} {have} been waiting for {_ranks(outside)}"
    return _diagnosis(
        f"{head} for {max(seen[rank].same_s for rank in inside):.0f} s",
        {rank: (*_place(seen[rank]), seen[rank].host) for rank in (*inside, *outside)},
        is_hang=bool(hanging),
        by_exit=by_exit,
        more=_stopped_text([rank for rank in stopped if rank in involved], seen),
    )


# ---- the words -------------------------------------------------------------------------------


def _diagnosis(
    head: str,
    words: Mapping[int, Words],
    *,
    is_hang: bool = False,
    by_exit: bool = False,
    more: str = "",
) -> Diagnosis:
    """What is told of ranks; those of a host that do the same at the same line stand together."""
    groups: dict[Words, list[int]] = {}
    for rank, what in words.items():
        groups.setdefault(what, []).append(rank)
    places = tuple(Place(tuple(ranks), *what) for what, ranks in groups.items())
    finding = f"{head}: {'; '.join(map(_sentence, places))}" if places else head
    begin = f"Hang: {head}" if is_hang else head[0].upper() + head[1:]
    advice = _ADVICE if is_hang and not more else ""
    notice = Notice(f"{begin}{finding.removeprefix(head)}. {more or advice}".rstrip())
    notice.head = f"{begin}. {more}".rstrip()
    notice.places, notice.advice = places, advice
    return Diagnosis(finding, notice, is_hang, by_exit)


def _of_one_collective(rank: int, seen: Mapping[int, Observed], *, is_hang: bool) -> Diagnosis:
    """What is said of a collective that all have come to, and that does not end for this rank."""
    collective = seen[rank].inside
    assert collective is not None
    words = dict[int, Words]()
    for other in sorted({rank, *collective.ranks} & seen.keys()):
        one = seen[other]
        values = next((call.values for call, _ in one.calls() if call.matches(collective)), "")
        done = [f"with {values}"] * bool(values) + ["through it"] * (not one.is_in(collective))
        spot = one.where.spot if one.where is not None else ""
        words[other] = ", and ".join(done), spot, one.host
    sizes = {doing.partition(",")[0] for doing, *_ in words.values() if doing.startswith("with ")}
    op, seconds = collective.op, f"{seen[rank].same_s:.0f} s"
    if not is_hang:
        more = "It is slow, or they have called it with different sizes, sources or operations."
        head = f"all that take part have been in {op} for {seconds}"
        return _diagnosis(head, words, more=more)
    how = f"not called {op} alike"
    if len(sizes) > 1:
        how = f"called {op} with tensors that do not go together"
    return _diagnosis(f"the ranks have {how}, {seconds} ago", words, is_hang=True)


def _ranks(ranks: Iterable[int]) -> str:
    """ "rank 1", "ranks 0, 2 and 3", "ranks 0-7"."""
    listed = format_ranks(ranks)
    before, _, last = listed.rpartition(", ")
    many = "s" * (bool(before) or "-" in last)
    return f"rank{many} {before} and {last}" if before else f"rank{many} {last}"


def _place(one: Observed) -> tuple[str, str]:
    """In which collective a rank is, or why it is in none, and its line."""
    where = one.where or Location()
    if one.left:
        return "has left the cell by exit() or sys.exit()", ""
    if one.is_over:
        return "has already finished the cell" if one.finished else "does not run this cell", ""
    if one.is_stopped:
        return "is not responding", ""
    if where.doing:
        return f"in {where.doing}", where.spot
    return "" if where.spot else "elsewhere", where.spot


def _sentence(place: Place) -> str:
    """ "ranks 0, 2 and 3 in barrier (Cell In[19], line 3)"."""
    ranks, doing, line, host = place
    at = f" ({line})" if doing else f"at {line}"
    return f"{_ranks(ranks)}{f' ({host})' * bool(host)} {doing}{at if line else ''}"


def _stopped_text(ranks: Iterable[int], seen: Mapping[int, Observed]) -> str:
    """What is said of processes that stand still."""
    return " ".join(
        f"Rank {rank} has been stopped for {seen[rank].stopped_s:.0f} s: `kill -CONT "
        f"{seen[rank].pid}` resumes it. To interrupt (■), or `%gpupool restart {rank}` for a cell "
        "in the background, replaces it: its variables are lost then."
        for rank in ranks
    )
