"""What is told of ranks that wait, hang or stand still: the whole table, without a process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpupool.core.wire.location import Collective, Location
from gpupool.notebook.cells.views import notice_html
from gpupool.pool.calls.diagnosis import Diagnosis, Observed, diagnose

HANG_S = 30.0
ALL = (0, 1, 2)


def within(op: str, line: int = 2, seq: int = 5, s: float = 31.0, ranks: tuple[int, ...] = ALL,
           group: str = "0", values: str = "") -> Observed:  # fmt: skip
    """A rank that is in a collective for `s` seconds."""
    collective = Collective(op, seq, ranks, s, values, group)
    return Observed(Location(f"Cell In[3], line {line}", collective, op), same_s=s)


def through(one: Observed, now: Observed, s: float = 31.0) -> Observed:
    """A rank that was where `one` is, which it called `s` seconds ago, and is elsewhere `now`."""
    assert one.inside is not None
    where = replace(now.where or Location(), last=(replace(one.inside, since_s=s),))
    return replace(now, where=where)


COMPUTES = Observed(Location("Cell In[3], line 7"))
IDLE = Location(idle=True)
FINISHED = Observed(IDLE, finished=True, same_s=31.0)
LEFT = replace(FINISHED, left=True)
ELSEWHERE = Observed(IDLE, runs_it=False, same_s=31.0)
STOPPED = Observed(Location("Cell In[3], line 7"), stopped_s=20, pid=123)
UNKNOWN = Observed()
WAITS = within("all_reduce")


def told(*ranks: Observed) -> Diagnosis | None:
    return diagnose(dict(enumerate(ranks)), HANG_S)


def found(*ranks: Observed) -> Diagnosis:
    diagnosis = told(*ranks)
    assert diagnosis is not None
    return diagnosis


def places(*ranks: Observed) -> dict[tuple[int, ...], tuple[str, str]]:
    return {one.ranks: (one.doing, one.line) for one in found(*ranks).places}


@pytest.mark.parametrize(
    "ranks",
    [
        (COMPUTES, COMPUTES, FINISHED),
        (UNKNOWN, UNKNOWN, UNKNOWN),
        (COMPUTES, replace(STOPPED, stopped_s=4), COMPUTES),
        (within("all_reduce", s=29.0), FINISHED, FINISHED),  # not yet
    ],
)
def test_a_long_computation_is_no_hang(ranks: tuple[Observed, ...]) -> None:
    assert told(*ranks) is None


AT_7 = "Cell In[3], line 7"
OUTSIDE = {  # a rank; whether others hang that wait for it; alone; and its place
    "computes": (COMPUTES, False, False, ("", AT_7)),
    "finished": (FINISHED, True, True, ("has already finished the cell", "")),
    "elsewhere": (ELSEWHERE, True, True, ("does not run this cell", "")),
    "stopped": (STOPPED, True, True, ("is not responding", "")),
    "other": (within("broadcast", 4), True, False, ("in broadcast", "Cell In[3], line 4")),
    "just there": (
        within("broadcast", 4, s=1.0),
        False,
        False,
        ("in broadcast", "Cell In[3], line 4"),
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_rank_that_is_not_in_the_collective_of_the_others(name: str) -> None:
    one, is_hang, also_while_one_computes, place = OUTSIDE[name]
    diagnosis = found(WAITS, one, WAITS)
    assert (diagnosis.is_hang, diagnosis.by_exit) == (is_hang, False)
    assert places(WAITS, one, WAITS) == {
        (0, 2): ("in all_reduce", "Cell In[3], line 2"),
        (1,): place,
    }
    assert found(WAITS, one, COMPUTES).is_hang == also_while_one_computes


def test_who_waits_for_a_rank_that_waits_for_one_that_computes_does_not_hang() -> None:
    pair, other = within("all_reduce", ranks=(0, 1)), within("gather", ranks=(1, 2), group="1")
    assert not found(pair, other, COMPUTES).is_hang
    assert (2,) in places(pair, other, COMPUTES)
    ring = pair, other, within("reduce", ranks=(0, 2), group="2")
    assert found(*ring).is_hang
    assert len(places(*ring)) == 3
    busy = replace(COMPUTES, runs_it=False)  # with another cell: of this one, all wait
    assert found(pair, within("broadcast", ranks=(0, 1)), busy).is_hang


def test_all_that_are_in_it_are_slow_or_have_called_it_with_different_sizes() -> None:
    begun = replace(FINISHED, where=replace(IDLE, collective=WAITS.inside))  # in the background
    assert not found(WAITS, begun, WAITS).is_hang
    sizes = [within("all_reduce", ranks=(0, 1), values=f"float32[{n}]") for n in (3, 4)]
    assert [doing for doing, _ in places(*sizes).values()] == ["with float32[3]", "with float32[4]"]


@pytest.mark.parametrize(("now", "size"), [(COMPUTES, 4), (FINISHED, 3)])
def test_who_stays_where_another_has_left_hangs(now: Observed, size: int) -> None:
    one = within("reduce", ranks=(0, 1), values="float32[4]")
    gone = through(within("reduce", ranks=(0, 1), values=f"float32[{size}]"), now)
    assert found(gone, one).is_hang
    how = "not called reduce alike" if size == 4 else "called reduce with tensors that do not go"
    assert how in found(gone, one).finding
    table = [doing for doing, _ in places(gone, one).values()]
    assert table == [f"with float32[{size}], and through it", "with float32[4]"]


def test_for_a_moment_one_is_through_it_before_another() -> None:
    one = within("all_reduce", ranks=(0, 1))
    assert not found(through(one, COMPUTES, s=0.1), one).is_hang
    other = within("barrier", seq=6, ranks=(0, 1))
    assert "in different collectives" in found(through(within("broadcast"), other), one).finding
    late = within("all_reduce", s=0.1)  # the others have waited for this one
    assert not found(through(WAITS, COMPUTES), WAITS, late).is_hang
    assert not found(through(WAITS, COMPUTES), WAITS, COMPUTES).is_hang  # and still do


def test_who_waits_for_a_rank_that_has_left_on_purpose_is_told_at_once() -> None:
    waits, left = within("all_reduce", s=0.6), replace(LEFT, same_s=0.6)
    diagnosis = found(waits, left, COMPUTES)
    assert (diagnosis.is_hang, diagnosis.by_exit) == (True, True)
    assert "rank 1 has left the cell by exit() or sys.exit()" in diagnosis.finding
    assert told(within("all_reduce", s=0.4), left, COMPUTES) is None
    assert told(COMPUTES, left, COMPUTES) is None  # it does its own
    assert told(within("all_reduce", s=0.6, ranks=(0, 2)), left, COMPUTES) is None


def test_those_who_send_and_receive_meet_and_two_who_receive_never_do() -> None:
    def peer(op: str) -> Observed:
        return within(op, seq=0, ranks=(0, 1), group="")

    assert not found(peer("recv"), peer("send")).is_hang
    assert found(peer("recv"), peer("recv")).is_hang


def test_ranks_of_each_host_stand_together_with_its_name() -> None:
    diagnosis = found(replace(WAITS, host="gpu1"), *[replace(FINISHED, host="gpu2")] * 2)
    assert [(one.ranks, one.host) for one in diagnosis.places] == [((0,), "gpu1"), ((1, 2), "gpu2")]
    assert "rank 0 (gpu1) in all_reduce" in diagnosis.finding
    assert ">1, 2 (gpu2)<" in notice_html(diagnosis)
