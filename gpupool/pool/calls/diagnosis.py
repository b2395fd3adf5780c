"""Whether ranks hang, and what is said of it. Pure functions; runs on the client.

A rank waits in a collective for the members of its group that are not in the same one. It waits for
ever if one of these never comes: it has finished, is stopped, or waits for ever itself. Whoever
computes may still come: that is reported, and is no hang.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpupool.core.formatting import format_ranks
from gpupool.core.wire.location import Collective, Location
from gpupool.pool.notices import Notice, Place

WARN_FROZEN_S = 5.0  # a process that stands still is reported
OFFER_FROZEN_S = 15.0  # and that it can be replaced
_SETTLED_S = 2.0  # answers of the ranks are not of the same moment
_LEFT_S = 0.5  # the same where a rank has left on purpose, and is known not to come
_ADVICE = "Interrupt (■) to stop all of them; variables are kept."


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong, in words.

    `is_hang`: it cannot end without help. `ranks`: those that others wait for, or that stand still.
    `advice` is what the user can do about a hang. `by_exit`: it hangs since one of these has left.
    `places` says the same rank by rank, below `head`.
    """

    finding: str
    is_hang: bool
    ranks: tuple[int, ...]
    advice: str = ""
    by_exit: bool = False
    head: str = ""
    places: tuple[Place, ...] = ()

    @property
    def text(self) -> Notice:
        """All that the user reads while it lasts."""
        text = f"{self.finding} {self.advice}".rstrip()
        return Notice(text, self.head or self.finding, self.places, self.advice)


@dataclass(frozen=True, slots=True)
class Observed:
    """What is known of one rank that takes part, or is waited for.

    `where` is its last answer, None before the first. `same_s`: seconds in the same collective;
    `silent_s`: since a question that it has not answered; `frozen_s`: in `state` "T", "t" or "D".
    `finished`: it has ended the cell; `left`: by `exit()` or `sys.exit()`; `runs_it`: it has begun
    it. `computes`: its main thread uses a processor. `behind_s`: for how long it has been known to
    be `left_behind`.
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
    computes: bool = False
    behind_s: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether nothing runs on it that could come to a collective."""
        return self.finished or (not self.runs_it and self.where is not None and self.where.idle)

    @property
    def inside(self) -> Collective | None:
        """The collective it is in."""
        return None if self.is_over or self.where is None else self.where.collective

    @property
    def is_frozen(self) -> bool:
        """Whether its process has stood still for a while."""
        return self.frozen_s >= WARN_FROZEN_S and self.state in ("T", "t", "D")


def diagnose(seen: Mapping[int, Observed], hang_after_s: float) -> Diagnosis | None:
    """What the user should know of these ranks; None if all is well as far as can be seen."""
    late = {rank: _late(rank, seen) for rank in seen}
    odds = {rank: _at_odds(rank, seen) for rank in seen}
    by_exit = {rank for rank in seen if any(seen[other].left for other in late[rank])}

    def lasts(rank: int) -> bool:
        return seen[rank].same_s >= (
            min(_LEFT_S, hang_after_s) if rank in by_exit else hang_after_s
        )

    waiting = [rank for rank in seen if late[rank] and lasts(rank)]
    # First, as it is the cause, whoever waits besides for those that cannot come out.
    apart = [rank for rank in seen if odds[rank] and not late[rank] and lasts(rank)] or [
        rank for rank in seen if lasts(rank) and seen[rank].behind_s >= hang_after_s / 2
    ]
    if apart:
        return _disagreement(apart[0], seen)
    frozen = [rank for rank, one in seen.items() if one.is_frozen and not one.finished]
    if not waiting:
        disagreeing = [rank for rank in seen if odds[rank] and lasts(rank)]
        if disagreeing:
            return _disagreement(disagreeing[0], seen)
        if frozen:
            return Diagnosis(_frozen_text(frozen, seen), False, tuple(frozen))
        return _slowness([rank for rank, one in seen.items() if one.inside and lasts(rank)], seen)
    stuck = _stuck(seen, late, odds, by_exit)
    is_hang = any(rank in stuck for rank in waiting)
    involved = _closure(waiting, late)
    inside = [rank for rank in involved if seen[rank].inside and late[rank]]
    outside = [rank for rank in involved if rank not in inside]
    seconds = max(seen[rank].same_s for rank in waiting)
    places = _folded({r: _waiting(r, seen) for r in inside})
    places += _folded({r: _absence(r, seen) for r in outside})
    head = _head(is_hang, inside, outside, seconds, seen)
    text = f"{head}: {_sentence(places)}."
    frozen, advice = [rank for rank in frozen if rank in involved], ""
    if frozen:
        frozen_text = _frozen_text(frozen, seen)
        text, head = f"{text} {frozen_text}", f"{head}. {frozen_text}"
    elif is_hang:
        advice = _ADVICE
    left = is_hang and not by_exit.isdisjoint(waiting)
    return Diagnosis(
        text, is_hang, tuple(outside or inside), advice, left, f"{head.rstrip('.')}.", tuple(places)
    )


def left_behind(seen: Mapping[int, Observed]) -> list[int]:
    """The ranks in a collective to which all have come, and which one that lives has left.

    For a moment that is as it must be. Who stays there gets nothing more: the others have called it
    with other sizes, or mean another source.
    """
    return [
        rank
        for rank in seen
        if _past(rank, seen)
        and not _late(rank, seen)
        and not any(seen[r].is_frozen for r in (rank, *_members(rank, seen)))
    ]


# ---- who waits for whom ----------------------------------------------------------------------


def _late(rank: int, seen: Mapping[int, Observed]) -> list[int]:
    """The ranks that the collective of a rank still needs."""
    collective = seen[rank].inside
    if collective is None:
        return []
    past = _past(rank, seen)
    return [
        r
        for r in _members(rank, seen)
        if r not in past and not any(map(collective.matches, _under_way(seen[r])))
    ]


def _past(rank: int, seen: Mapping[int, Observed]) -> list[int]:
    """The ranks that have left the collective of a rank, or are beyond it."""
    collective = seen[rank].inside
    if collective is None:
        return []
    return [
        r
        for r in _members(rank, seen)
        if not any(map(collective.matches, _under_way(seen[r])))
        and any(collective.matches(k) or collective.precedes(k) for k in _known(seen[r]))
    ]


def _members(rank: int, seen: Mapping[int, Observed]) -> list[int]:
    """The others that take part in the collective of a rank."""
    collective = seen[rank].inside
    return [] if collective is None else [r for r in collective.ranks if r != rank and r in seen]


def _at_odds(rank: int, seen: Mapping[int, Observed]) -> list[int]:
    """The ranks that came to the collective of a rank with other tensors."""
    collective = seen[rank].inside
    if collective is None:
        return []
    return [r for r in seen if r != rank and any(map(collective.disagrees, _known(seen[r])))]


def _known(one: Observed) -> tuple[Collective, ...]:
    """The collectives that a rank is in, or was last."""
    return () if one.where is None else (*_under_way(one), *one.where.last)


def _under_way(one: Observed) -> tuple[Collective, ...]:
    """The collectives that a rank is in."""
    if one.where is None or one.where.collective is None:
        return ()
    return (one.where.collective, *one.where.also)


def _stuck(
    seen: Mapping[int, Observed],
    late: Mapping[int, list[int]],
    odds: Mapping[int, list[int]],
    by_exit: Iterable[int],
) -> set[int]:
    """The ranks that can never continue: what is left when all that can have done so."""
    moving = {
        rank
        for rank, one in seen.items()
        if not one.is_over
        and not (one.is_frozen and one.state == "T")
        and not ((odds[rank] or _past(rank, seen)) and one.same_s >= _SETTLED_S)
        and (not late[rank] or one.same_s < (_LEFT_S if rank in by_exit else _SETTLED_S))
    }
    while True:
        more = {rank for rank in late if late[rank] and moving.issuperset(late[rank])} - moving
        if not more:
            return set(seen) - moving
        moving |= more


def _closure(ranks: Iterable[int], late: Mapping[int, list[int]]) -> list[int]:
    """These ranks, those they wait for, those these wait for, and so on."""
    found = set[int]()
    to_do = list(ranks)
    while to_do:
        rank = to_do.pop()
        if rank not in found:
            found.add(rank)
            to_do += late[rank]
    return sorted(found)


# ---- the words -------------------------------------------------------------------------------


def _disagreement(rank: int, seen: Mapping[int, Observed]) -> Diagnosis:
    """What is said of ranks that have not called one collective alike."""
    collective = seen[rank].inside
    assert collective is not None
    words, sizes = dict[int, tuple[str, str]](), set[str]()
    for other in sorted({rank, *_members(rank, seen)}):
        known = [one for one in _known(seen[other]) if collective.matches(one)]
        values = known[0].values if known else ""
        sizes.add(values)
        if seen[other].inside in known:
            words[other] = (
                f"with {values}" if values else f"in {collective.op}",
                _line(seen[other]),
            )
        elif known or any(map(collective.precedes, _known(seen[other]))):
            now = _waiting(other, seen)[0] if seen[other].inside else ""
            given = f"with {values}, and " if values else ""
            words[other] = f"{given}through it{f', now {now}' if now else ''}", _line(seen[other])
    name = collective.op
    how = f"not called {name} alike"
    if len(sizes - {""}) > 1:
        how = f"called {name} with tensors that do not go together"
    head = f"Hang: the ranks have {how}, {seen[rank].same_s:.0f} s ago"
    places = _folded(words)
    text = f"{head}: {_sentence(places)}."
    return Diagnosis(text, True, tuple(words), _ADVICE, head=f"{head}.", places=tuple(places))


def _slowness(ranks: list[int], seen: Mapping[int, Observed]) -> Diagnosis | None:
    """What is said of ranks in collectives that all have come to, and that do not end."""
    if not ranks:
        return None
    seconds = max(seen[rank].same_s for rank in ranks)
    places = _folded({rank: _waiting(rank, seen) for rank in ranks})
    head = f"All that take part have been in one collective for {seconds:.0f} s"
    why = "It is slow, or they do not mean the same source, operation or tag."
    text = f"{head}: {_sentence(places)}. {why}"
    return Diagnosis(text, False, tuple(ranks), head=f"{head}. {why}", places=tuple(places))


def _head(
    is_hang: bool,
    inside: list[int],
    outside: list[int],
    seconds: float,
    seen: Mapping[int, Observed],
) -> str:
    hang = "Hang: " if is_hang else ""
    if outside:
        have = "have" if len(inside) > 1 else "has"
        who, whom = _ranks(inside), _ranks(outside)
        who = who if is_hang else who.capitalize()
        return f"{hang}{who} {have} been waiting for {whom} for {seconds:.0f} s"
    words = f"{hang}the ranks have" if is_hang else "The ranks have"
    if len({(one.op, one.seq) for rank in inside if (one := seen[rank].inside)}) > 1:
        return f"{words} been in different collectives for {seconds:.0f} s"
    return f"{words} been waiting for each other for {seconds:.0f} s"


def _ranks(ranks: Iterable[int]) -> str:
    """ "rank 1", "ranks 0, 2 and 3", "ranks 0-7"."""
    listed = format_ranks(ranks)
    before, _, last = listed.rpartition(", ")
    many = "s" * (bool(before) or "-" in last)
    return f"rank{many} {before} and {last}" if before else f"rank{many} {last}"


def _line(one: Observed) -> str:
    if one.where is None or not one.where.line:
        return ""
    return f"queued at or before {one.where.line}" if one.where.queued else one.where.line


def _waiting(rank: int, seen: Mapping[int, Observed]) -> tuple[str, str]:
    """In which collective a rank is, and at which line; of two of one kind, which is earlier."""
    one = seen[rank]
    if one.where is None:
        return "in an unknown place", ""
    mine = one.inside
    is_behind = mine is not None and any(
        other.inside is not None and other.inside.op == mine.op and mine.precedes(other.inside)
        for other in seen.values()
    )
    return f"in {'an earlier ' * is_behind}{one.where.doing}", _line(one)


def _absence(rank: int, seen: Mapping[int, Observed]) -> tuple[str, str]:
    """Why a rank is not in the collective of those that wait for it, and its line."""
    one = seen[rank]
    last = one.where.last[-1].op if one.where is not None and one.where.last else ""
    if one.is_over:
        what = "has already finished the cell" if one.finished else "does not run this cell"
        what = "has left the cell by exit() or sys.exit()" if one.left else what
        return f"{what} (its last collective was {last})" if last else what, ""
    if one.is_frozen:
        return "is not responding", ""
    if one.silent_s >= WARN_FROZEN_S:
        held = "busy in C code that holds the GIL"
        return f"has not responded for {one.silent_s:.0f} s ({held})", _line(one)
    if one.where is not None and one.where.doing:
        return _waiting(rank, seen)
    return "computing" if one.computes else "elsewhere" if not _line(one) else "", _line(one)


def _folded(words: Mapping[int, tuple[str, str]]) -> list[Place]:
    """One place for all ranks that do the same at the same line."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, what in words.items():
        groups.setdefault(what, []).append(rank)
    return [Place(tuple(ranks), doing, line) for (doing, line), ranks in groups.items()]


def _sentence(places: Iterable[Place]) -> str:
    """ "ranks 0, 2 and 3 in barrier (Cell In[19], line 3); rank 1 at Cell In[19], line 5"."""
    parts = []
    for ranks, doing, line in places:
        at = f" ({line})" if doing else f"at {line}"
        parts.append(f"{_ranks(ranks)} {doing}{at if line else ''}")
    return "; ".join(parts)


def _frozen_text(ranks: list[int], seen: Mapping[int, Observed]) -> str:
    """What is said of processes that stand still, and from when on how to replace them."""
    sentences = [_frozen(rank, seen[rank]) for rank in ranks]
    if any(seen[rank].frozen_s >= OFFER_FROZEN_S for rank in ranks):
        listed = ",".join(map(str, ranks))
        lost = "s" * (len(ranks) > 1) + f" {listed}, whose variables are lost"
        sentences.append(
            f"Or interrupt (■): that frees the others and replaces rank{lost} (for a cell in the "
            f"background: `%gpupool restart {listed}`)."
        )
    return " ".join(sentences)


def _frozen(rank: int, one: Observed) -> str:
    process = f"Rank {rank} (process {one.pid})"
    since = f"for {one.frozen_s:.0f} s"
    if one.state == "T":
        return f"{process} has been stopped {since}: `kill -CONT {one.pid}` resumes it."
    if one.state == "t":
        return f"{process} has been held by a debugger {since}."
    return (
        f"{process} has been waiting in the kernel {since} (state D: a disk, a network file system "
        "or the GPU's driver does not answer)."
    )
