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

WARN_FROZEN_S = 5.0  # a process that stands still, or does not answer, is reported
_LEFT_S = 0.5  # instead of `hang_after_s`, where a rank has left on purpose
_STANDS = {
    "T": "stopped for {s:.0f} s: `kill -CONT {pid}` resumes it.",
    "t": "held by a debugger for {s:.0f} s.",
    "D": "waiting in the kernel for {s:.0f} s: a disk, a network or a driver does not answer.",
}
_ADVICE = "Interrupt (■) to stop all of them; variables are kept."


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong: `head` in words, the place of each rank, and `more` about some of them.

    `is_hang`: it cannot end without help. `ranks`: those that others wait for, or that stand still.
    `by_exit`: it hangs since one of these has left.
    """

    head: str
    places: tuple[Place, ...]
    is_hang: bool
    ranks: tuple[int, ...]
    more: str = ""
    by_exit: bool = False

    @property
    def finding(self) -> str:
        """All of it as one text."""
        places = f": {_sentence(self.places)}" if self.places else ""
        return f"{self.head}{places}. {self.more}".rstrip()

    @property
    def text(self) -> Notice:
        """All that the user reads while it lasts."""
        advice = _ADVICE if self.is_hang and not self.more else ""
        head = f"{self.head}. {self.more}".rstrip()
        return Notice(f"{self.finding} {advice}".rstrip(), head, self.places, advice)


@dataclass(frozen=True, slots=True)
class Observed:
    """What is known of one rank that takes part, or is waited for.

    `where` is its last answer, None before the first. `same_s`: seconds in the same collective, or
    since it is over; `silent_s`: since a question that it has not answered; `frozen_s`: in the
    `state` of its process, such as "T". `finished`: it has ended the cell; `left`: by `exit()` or
    `sys.exit()`; `runs_it`: it has begun it.
    """

    where: Location | None = None
    finished: bool = False
    left: bool = False
    runs_it: bool = True
    same_s: float = 0.0
    silent_s: float = 0.0
    state: str = "S"
    frozen_s: float = 0.0
    pid: int = 0

    @property
    def is_over(self) -> bool:
        """Whether nothing runs on it that could come to a collective."""
        return self.finished or (not self.runs_it and self.where is not None and self.where.idle)

    @property
    def inside(self) -> Collective | None:
        """The collective it waits in; one that does not answer may have left it."""
        if self.where is None or self.is_over or self.silent_s >= WARN_FROZEN_S:
            return None
        return self.where.collective

    @property
    def is_frozen(self) -> bool:
        """Whether its process has stood still for a while."""
        return self.frozen_s >= WARN_FROZEN_S and self.state in _STANDS

    @property
    def is_stopped(self) -> bool:
        """Whether it stands still until somebody makes it go on."""
        return self.is_frozen and self.state == "T"

    @property
    def calls(self) -> list[Collective]:
        """The collectives that are known of it: the one it is in first."""
        where = self.where or Location()
        return [*([where.collective] if where.collective else []), *where.last]

    def is_in(self, collective: Collective) -> bool:
        """Whether its part of this collective is under way, also if it does not wait for it."""
        now = self.where.collective if self.where and self.silent_s < WARN_FROZEN_S else None
        return now is not None and now.matches(collective)

    def came_s(self, collective: Collective) -> float | None:
        """How long ago it came to this collective, or to a later one; None if it has not come."""
        if self.is_in(collective):
            return self.same_s
        number, now = collective.number, self.where.collective if self.where else None
        known = [one for one in self.calls if one.group == collective.group]
        if not number or any(one.number == number and one.op != collective.op for one in known):
            return None  # nobody knows, or it has called another one instead
        if now is not None and now in known and now.number > number:
            return self.same_s
        return next((one.since_s for one in known if one is not now and one.number >= number), None)


def diagnose(seen: Mapping[int, Observed], hang_after_s: float) -> Diagnosis | None:
    """What the user should know of these ranks; None if all is well as far as can be seen."""
    waits = {rank: one.inside for rank, one in seen.items() if one.inside}
    came = {
        rank: {r: seen[r].came_s(collective) for r in collective.ranks if r != rank and r in seen}
        for rank, collective in waits.items()
    }
    late = {rank: [other for other, s in came[rank].items() if s is None] for rank in waits}
    by_exit = {rank for rank in waits if any(seen[other].left for other in late[rank])}
    nobody_moves = all(
        one.is_over or one.is_stopped or (rank in waits and one.same_s >= hang_after_s)
        for rank, one in seen.items()
        if one.runs_it
    )

    def limit_s(rank: int) -> float:
        return min(_LEFT_S, hang_after_s) if rank in by_exit else hang_after_s

    def never_comes(other: int, rank: int) -> bool:
        one = seen[other]
        is_over = one.is_over and one.same_s >= limit_s(rank)
        return one.is_stopped or is_over or (other in waits and nobody_moves)

    def is_left_alone(rank: int) -> bool:  # for a moment that is as it must be
        others = came[rank].items()
        has_left = any(not seen[other].is_in(waits[rank]) for other, _ in others)
        return has_left and all(s is not None and s >= hang_after_s for _, s in others)

    lasting = [rank for rank in waits if seen[rank].same_s >= limit_s(rank)]
    unlike = [rank for rank in lasting if is_left_alone(rank)]
    if unlike:  # first, as it may be why others wait
        return _difference(unlike[0], seen)
    hanging = [rank for rank in lasting if any(never_comes(other, rank) for other in late[rank])]
    waiting = hanging or [rank for rank in lasting if late[rank]]
    frozen = [rank for rank, one in seen.items() if one.is_frozen and not one.finished]
    if not waiting and frozen:
        said = _frozen_text(frozen, seen).removesuffix(".")
        return Diagnosis(said, (), False, tuple(frozen))
    if not waiting:
        return _slowness(lasting, seen) if lasting else None
    involved = sorted({*waiting, *(other for rank in waiting for other in late[rank])})
    inside = [rank for rank in involved if late.get(rank)]
    outside = [rank for rank in involved if rank not in inside]
    return Diagnosis(
        _head(bool(hanging), inside, outside, seen),
        _folded({rank: _place(seen[rank]) for rank in (*inside, *outside)}),
        bool(hanging),
        tuple(outside or inside),
        _frozen_text([rank for rank in frozen if rank in involved], seen),
        not by_exit.isdisjoint(hanging),
    )


# ---- the words -------------------------------------------------------------------------------


def _difference(rank: int, seen: Mapping[int, Observed]) -> Diagnosis:
    """What is said of ranks that have not called one collective alike."""
    collective = seen[rank].inside
    assert collective is not None
    words, sizes = dict[int, tuple[str, str]](), set[str]()
    for other in sorted({rank, *collective.ranks} & seen.keys()):
        one = seen[other]
        values = next((call.values for call in one.calls if call.matches(collective)), "")
        sizes |= {values} - {""}
        done = [f"with {values}"] * bool(values) + ["through it"] * (not one.is_in(collective))
        words[other] = ", and ".join(done), one.where.spot if one.where is not None else ""
    how = f"not called {collective.op} alike"
    if len(sizes) > 1:
        how = f"called {collective.op} with tensors that do not go together"
    head = f"Hang: the ranks have {how}, {seen[rank].same_s:.0f} s ago"
    return Diagnosis(head, _folded(words), True, tuple(words))


def _slowness(ranks: list[int], seen: Mapping[int, Observed]) -> Diagnosis:
    """What is said of ranks in collectives that all have come to, and that do not end."""
    seconds = max(seen[rank].same_s for rank in ranks)
    values = {rank: one.values for rank in ranks if (one := seen[rank].inside)}
    words = {rank: _place(seen[rank]) for rank in ranks}
    if len(set(values.values())) > 1:
        words = {r: (f"{doing} with {values[r]}", line) for r, (doing, line) in words.items()}
    return Diagnosis(
        f"All that take part have been in one collective for {seconds:.0f} s",
        _folded(words),
        False,
        tuple(ranks),
        "It is slow, or they have called it with different sizes, sources or operations.",
    )


def _head(
    is_hang: bool, inside: list[int], outside: list[int], seen: Mapping[int, Observed]
) -> str:
    seconds = max(seen[rank].same_s for rank in inside)
    if outside:
        have = "have" if len(inside) > 1 else "has"
        words = f"{_ranks(inside)} {have} been waiting for {_ranks(outside)}"
    else:
        words = "the ranks have been in different collectives"
    words = f"Hang: {words}" if is_hang else words[0].upper() + words[1:]
    return f"{words} for {seconds:.0f} s"


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
    if one.is_frozen:
        return "is not responding", ""
    if one.silent_s >= WARN_FROZEN_S:
        held = "busy in C code that holds the GIL"
        return f"has not responded for {one.silent_s:.0f} s ({held})", where.spot
    if where.doing:
        return f"in {where.doing}", where.spot
    return "" if where.spot else "elsewhere", where.spot


def _folded(words: Mapping[int, tuple[str, str]]) -> tuple[Place, ...]:
    """One place for all ranks that do the same at the same line."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, what in words.items():
        groups.setdefault(what, []).append(rank)
    return tuple(Place(tuple(ranks), doing, line) for (doing, line), ranks in groups.items())


def _sentence(places: Iterable[Place]) -> str:
    """ "ranks 0, 2 and 3 in barrier (Cell In[19], line 3); rank 1 at Cell In[19], line 5"."""
    parts = []
    for ranks, doing, line in places:
        at = f" ({line})" if doing else f"at {line}"
        parts.append(f"{_ranks(ranks)} {doing}{at if line else ''}")
    return "; ".join(parts)


def _frozen_text(ranks: Iterable[int], seen: Mapping[int, Observed]) -> str:
    """What is said of processes that stand still."""
    return " ".join(
        f"Rank {rank} (process {(one := seen[rank]).pid}) has been "
        f"{_STANDS[one.state].format(s=one.frozen_s, pid=one.pid)} To interrupt (■), or "
        f"`%gpupool restart {rank}` for a cell in the background, replaces it: its variables are "
        "lost then."
        for rank in ranks
    )
