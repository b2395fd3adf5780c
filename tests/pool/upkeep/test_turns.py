"""Who may use the ranks when: the row by itself, without ranks."""

from __future__ import annotations

import threading

from gpupool.pool.upkeep.turns import Turns

SOON_S = 30.0


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
    mending = turns.ask([0, 1, 2], "the process group", first=True)
    assert turns.mending_waits_for == ("one", "three")
    assert turns.begin(second) == ["one", "the process group"]
    turns.end(first)
    assert turns.begin(mending) == ["three"]
    turns.end(third)
    assert turns.begin(mending) == []
    assert turns.mending_waits_for == ()


def test_whoever_waits_for_a_turn_hears_of_it() -> None:
    turns = Turns(threading.Condition())
    running, waiting = turns.ask([0], "one"), turns.ask([0], "two")
    turns.begin(running)
    thread = threading.Thread(target=turns.begin, args=[waiting, None], daemon=True)
    thread.start()
    turns.end(running)
    thread.join(SOON_S)
    assert waiting.began
