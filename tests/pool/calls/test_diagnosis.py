"""What is told of ranks that wait, hang or stand still: the whole table, without a process."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from gpupool.core.wire.location import Collective, Location
from gpupool.pool.calls.diagnosis import Diagnosis, Observed, diagnose, left_behind

HANG_S = 30.0
ALL = (0, 1, 2)


def within(op: str, line: int = 2, seq: int = 5, s: float = 31.0, ranks: tuple[int, ...] = ALL,
           group: str = "0") -> Observed:  # fmt: skip
    """A rank that is in a collective for `s` seconds."""
    collective = Collective(op, seq, ranks, s, group=group)
    return Observed(Location(f"Cell In[3], line {line}", collective, op), same_s=s)


def peer(op: str, other: int, me: int) -> Observed:
    return within(op, seq=0, ranks=tuple(sorted((me, other))), group="")


COMPUTES = Observed(Location("Cell In[3], line 7"), computes=True)
SLEEPS = Observed(Location("Cell In[3], line 7"))
IDLE = Location(idle=True)
FINISHED = Observed(IDLE, finished=True)
ELSEWHERE = Observed(IDLE, runs_it=False)
SILENT = Observed(Location("Cell In[3], line 7"), silent_s=20.0)
STOPPED = Observed(Location("Cell In[3], line 7"), silent_s=20, state="T", frozen_s=20, pid=123)
UNKNOWN = Observed()
WAITS = within("all_reduce")


def told(*ranks: Observed, hang_after_s: float = HANG_S) -> Diagnosis | None:
    return diagnose(dict(enumerate(ranks)), hang_after_s)


def text(*ranks: Observed) -> str:
    diagnosis = told(*ranks)
    assert diagnosis is not None
    return diagnosis.text


@pytest.mark.parametrize(
    "ranks",
    [
        (COMPUTES, COMPUTES, COMPUTES),
        (COMPUTES, SLEEPS, FINISHED),
        (FINISHED, FINISHED, FINISHED),
        (UNKNOWN, UNKNOWN, UNKNOWN),
        (SILENT, COMPUTES, COMPUTES),  # C code computes
        (within("all_reduce", s=29.0), FINISHED, FINISHED),  # not yet
    ],
)
def test_a_long_computation_is_no_hang(
    ranks: tuple[Observed, ...],
) -> None:
    assert told(*ranks) is None


OUTSIDE = {
    "computes": (COMPUTES, False, "computing (Cell In[3], line 7)"),
    "sleeps": (SLEEPS, False, "at Cell In[3], line 7"),
    "finished": (FINISHED, True, "has already finished the cell"),
    "elsewhere": (ELSEWHERE, True, "does not run this cell"),
    "silent": (SILENT, False, "has not responded for 20 s (busy in C code that holds the GIL)"),
    "stopped": (STOPPED, True, "is not responding"),
    "unknown": (UNKNOWN, False, "elsewhere"),
    "other-op": (within("broadcast", line=4), True, "in broadcast (Cell In[3], line 4)"),
    "other-seq": (
        within("all_reduce", seq=4),
        True,
        "in an earlier all_reduce (Cell In[3], line 2)",
    ),
    "just-there": (within("broadcast", line=4, s=1.0), False, "in broadcast (Cell In[3]"),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_rank_that_is_not_in_the_collective_of_the_others(name: str) -> None:
    one, is_hang, words = OUTSIDE[name]
    diagnosis = told(WAITS, one, WAITS)
    assert diagnosis is not None
    assert diagnosis.is_hang == is_hang
    assert f"rank 1 {words}" in diagnosis.text
    assert "ranks 0 and 2 in all_reduce (Cell In[3], line 2)" in diagnosis.text
    table = {ranks: f"{doing} ({line})" for ranks, doing, line in diagnosis.text.places}
    assert table[0, 2] == "in all_reduce (Cell In[3], line 2)"
    assert table.keys() == {(0, 2), (1,)}


@pytest.mark.parametrize(("first", "second"), [*product(OUTSIDE, OUTSIDE)])
def test_it_is_a_hang_as_soon_as_one_that_is_needed_can_never_come(first: str, second: str) -> None:
    diagnosis = told(WAITS, OUTSIDE[first][0], OUTSIDE[second][0])
    assert diagnosis is not None
    assert 0 not in diagnosis.ranks or {first, second} <= {"other-op", "other-seq", "just-there"}
    never = {"finished", "elsewhere", "stopped"}
    inside = {"other-op", "other-seq", "just-there"}
    if {first, second} & never:
        assert diagnosis.is_hang
    elif not {first, second} & inside:
        assert not diagnosis.is_hang


def test_the_sentences() -> None:
    assert text(WAITS, FINISHED, WAITS) == (
        "Hang: ranks 0 and 2 have been waiting for rank 1 for 31 s: ranks 0 and 2 in all_reduce "
        "(Cell In[3], line 2); rank 1 has already finished the cell. Interrupt (■) to stop all of "
        "them; variables are kept."
    )
    assert text(WAITS, COMPUTES, WAITS) == (
        "Ranks 0 and 2 have been waiting for rank 1 for 31 s: ranks 0 and 2 in all_reduce "
        "(Cell In[3], line 2); rank 1 computing (Cell In[3], line 7)."
    )
    assert text(WAITS, within("broadcast", line=4), WAITS) == (
        "Hang: the ranks have been in different collectives for 31 s: ranks 0 and 2 in all_reduce "
        "(Cell In[3], line 2); rank 1 in broadcast (Cell In[3], line 4). Interrupt (■) to stop all "
        "of them; variables are kept."
    )
    assert text(WAITS, replace(FINISHED, where=replace(IDLE, last=(Collective("gather", 4),)))) == (
        "Hang: rank 0 has been waiting for rank 1 for 31 s: rank 0 in all_reduce (Cell In[3], "
        "line 2); rank 1 has already finished the cell (its last collective was gather). "
        "Interrupt (■) to stop all of them; variables are kept."
    )


def test_a_rank_that_has_been_there_or_called_it_in_the_background_is_not_missing() -> None:
    collective = WAITS.inside
    assert collective is not None
    been = replace(FINISHED, where=replace(IDLE, last=(collective,)))
    begun = replace(FINISHED, where=replace(IDLE, collective=collective))
    other = within("broadcast", group="1", ranks=(1, 2))
    assert other.where is not None
    also = replace(other, where=replace(other.where, also=(collective,)))
    for ranks in ((WAITS, been, begun), (WAITS, WAITS, WAITS)):
        slow = told(*ranks)
        assert slow is not None
        assert not slow.is_hang
        assert slow.text.startswith("All that take part have been in one collective for 31 s: ")
    assert told(WAITS, also, WAITS) is not None  # as rank 2 is not in the broadcast
    slow = told(within("all_reduce", ranks=(0, 1)), also, other)
    assert slow is not None
    assert not slow.is_hang


@pytest.mark.parametrize("is_through", [False, True])
def test_tensors_that_do_not_go_together_are_a_hang(is_through: bool) -> None:
    def one(values: str, op: str = "all_reduce") -> Observed:
        waits = within(op, ranks=(0, 1))
        assert waits.where is not None
        assert waits.where.collective is not None
        collective = replace(waits.where.collective, values=values)
        return replace(waits, where=replace(waits.where, collective=collective))

    first, second = one("float32[3]"), one("float32[4]")
    if is_through:
        assert first.inside is not None
        first = replace(FINISHED, where=replace(IDLE, last=(first.inside,)))
    where = ", and through it" if is_through else " (Cell In[3], line 2)"
    diagnosis = told(first, second)
    assert diagnosis is not None
    assert diagnosis.is_hang
    assert diagnosis.text == (
        "Hang: the ranks have called all_reduce with tensors that do not go together, 31 s ago: "
        f"rank 0 with float32[3]{where}; rank 1 with float32[4] (Cell In[3], line 2). Interrupt "
        "(■) to stop all of them; variables are kept."
    )
    uneven = told(one("float32[3]", "all_to_all"), one("float32[4]", "all_to_all"))
    assert uneven is not None
    assert not uneven.is_hang


def called(values: str, op: str = "all_reduce", seq: int = 5, s: float = 31.0) -> Observed:
    """A rank of two that is in a collective with tensors of this size."""
    waits = within(op, ranks=(0, 1), seq=seq, s=s)
    assert waits.where is not None
    assert waits.inside is not None
    collective = replace(waits.inside, values=values)
    return replace(waits, where=replace(waits.where, collective=collective))


def through(one: Observed, now: Location = COMPUTES.where or IDLE, **more: bool) -> Observed:
    """A rank that was where `one` is, and is elsewhere `now`."""
    assert one.inside is not None
    return replace(COMPUTES, where=replace(now, last=(one.inside, *now.last)), **more)


def test_a_rank_that_went_on_to_the_next_collective_does_not_hide_the_cause() -> None:
    next_one = called("float32[1]", seq=6).where
    assert next_one is not None
    beyond = replace(
        called("float32[1]", seq=6), where=through(called("float32[3]"), next_one).where
    )
    assert text(beyond, called("float32[4]")) == (
        "Hang: the ranks have called all_reduce with tensors that do not go together, 31 s ago: "
        "rank 0 with float32[3], and through it, now in all_reduce (Cell In[3], line 2); rank 1 "
        "with float32[4] (Cell In[3], line 2). Interrupt (■) to stop all of them; variables are "
        "kept."
    )


def test_the_same_number_of_values_in_another_shape_goes_together() -> None:
    slow = told(called("float32[2, 2]"), called("float32[4]"))
    assert slow is not None
    assert not slow.is_hang
    for other in ("float64[4]", "float32[5]", "float32[4], ... (2 tensors)", "float32[]"):
        found = told(called(other), called("float32[4]"))
        assert found is not None
        assert found.is_hang


@pytest.mark.parametrize("op", ["all_reduce", "all_to_all", "broadcast"])
def test_who_stays_in_a_collective_that_another_has_left_hangs(op: str) -> None:
    one = called("float32[4]", op)
    for other in (through(one), through(one, IDLE, finished=True)):
        seen = {0: other, 1: one}
        assert left_behind(seen) == [1]
        at_once = diagnose(seen, HANG_S)
        assert at_once is not None
        assert not at_once.is_hang  # it may just be about to end there too
        diagnosis = diagnose({0: other, 1: replace(one, behind_s=15.0)}, HANG_S)
        assert diagnosis is not None
        assert (diagnosis.is_hang, diagnosis.ranks) == (True, (0, 1))
        assert f"the ranks have not called {op} alike, 31 s ago" in diagnosis.text
        assert "rank 1 with float32[4] (Cell In[3], line 2)" in diagnosis.text
        assert "rank 0 with float32[4], and through it" in diagnosis.text
        young = replace(one, same_s=29.0, behind_s=20.0)
        assert diagnose({0: other, 1: young}, HANG_S) is None


def test_a_rank_that_has_left_and_computes_is_waited_for_by_nobody_inside() -> None:
    one = called("float32[4]")
    assert left_behind({0: COMPUTES, 1: one}) == []  # it has not come yet
    stopped = replace(STOPPED, where=one.where)
    three = replace(one, where=within("all_reduce").where)
    assert left_behind({0: through(three), 1: three, 2: stopped}) == []  # that one is the cause
    assert left_behind({0: one, 1: one}) == []


def test_who_waits_for_a_rank_that_has_left_on_purpose_is_told_at_once() -> None:
    waits, left = within("all_reduce", s=0.6), replace(FINISHED, left=True)
    diagnosis = told(waits, left, COMPUTES)
    assert diagnosis is not None
    assert (diagnosis.is_hang, diagnosis.by_exit) == (True, True)
    assert "rank 1 has left the cell by exit() or sys.exit()" in diagnosis.text
    assert told(within("all_reduce", s=0.4), left, COMPUTES) is None
    assert told(SLEEPS, left, COMPUTES) is None  # it does its own
    assert told(within("all_reduce", s=0.6, ranks=(0, 2)), left, COMPUTES) is None


def test_those_who_send_and_receive_meet_and_two_who_receive_never_do() -> None:
    slow = told(peer("recv", 1, 0), peer("send", 0, 1))
    assert slow is not None
    assert not slow.is_hang
    diagnosis = told(peer("recv", 1, 0), peer("recv", 0, 1))
    assert diagnosis is not None
    assert diagnosis.is_hang
    assert "ranks 0 and 1 in recv (Cell In[3], line 2)" in diagnosis.text


def test_who_waits_for_a_rank_that_waits_for_one_that_computes_does_not_hang() -> None:
    pair, other = within("all_reduce", ranks=(0, 1)), within("gather", ranks=(1, 2), group="1")
    diagnosis = told(pair, other, COMPUTES)
    assert diagnosis is not None
    assert (diagnosis.is_hang, diagnosis.ranks) == (False, (2,))
    ring = told(pair, other, within("reduce", ranks=(0, 2), group="2"))
    assert ring is not None
    assert (ring.is_hang, ring.ranks) == (True, (0, 1, 2))


@pytest.mark.parametrize(("seconds", "is_told", "is_offered"), [(4, 0, 0), (5, 1, 0), (15, 1, 1)])
@pytest.mark.parametrize(("state", "words"), [("T", "`kill -CONT 123`"), ("D", "state D")])
def test_a_process_that_stands_still(
    state: str, words: str, seconds: float, is_told: bool, is_offered: bool
) -> None:
    diagnosis = told(COMPUTES, replace(STOPPED, state=state, frozen_s=seconds), COMPUTES)
    assert (diagnosis is not None) == is_told
    if diagnosis is not None:
        assert words in diagnosis.text
        assert "Rank 1 (process 123) has been " in diagnosis.text
        assert (not diagnosis.is_hang, diagnosis.ranks) == (True, (1,))
        assert ("%gpupool restart 1" in diagnosis.text) == is_offered
