"""Who may use the ranks when: the row by itself, without ranks."""

from __future__ import annotations

import threading

from gpupool.pool.upkeep.turns import Turns


def test_what_needs_the_same_rank_waits_in_the_order_of_asking() -> None:
    turns = Turns(threading.Condition())
    first, second, third = (turns.ask([0, 1], name) for name in ("one", "two", "three"))
    assert turns.begin(first) == []
    assert turns.begin(second) == ["one"]
    assert turns.begin(third) == ["one", "two"]
    turns.end(first)
    assert turns.begin(third) == ["two"]
    turns.end(second)  # it has given up its place
    assert turns.begin(third) == []


def test_what_mends_the_pool_comes_before_all_that_wait_and_after_all_that_run() -> None:
    turns = Turns(threading.Condition())
    first, second, third = turns.ask([0], "one"), turns.ask([0, 1], "two"), turns.ask([2], "three")
    assert [turns.begin(turn) for turn in (first, second, third)] == [[], ["one"], []]
    mending = turns.ask([0, 1, 2], "the process group", "forms")
    assert turns.mending_waits_for == ("one", "three")
    assert turns.begin(second) == ["one", "the process group"]
    turns.end(first)
    assert turns.begin(mending) == ["three"]
    turns.end(third)
    assert turns.begin(mending) == []
    assert turns.mending_waits_for == ()


def test_a_task_waits_for_the_forming_of_the_group_only_where_others_wait_for_that() -> None:
    turns = Turns(threading.Condition())
    running, forming = turns.ask([0], "one", "task"), turns.ask([0, 1], "the group", "forms")
    assert turns.begin(running) == []
    assert turns.begin(forming) == ["one"]
    assert turns.begin(turns.ask([1], "two", "task")) == []
    cell = turns.ask([0, 1], "cell")
    late = turns.ask([1], "three", "task")
    assert turns.begin(late) == ["the group", "two", "cell"]
    turns.end(cell)
    assert turns.begin(late) == ["two"]
