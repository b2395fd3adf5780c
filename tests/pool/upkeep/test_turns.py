"""Who may use the ranks when: the row by itself, without ranks."""

from __future__ import annotations

import threading

from gpupool.pool.upkeep.turns import Turns

SOON_S = 30.0


def test_what_needs_the_same_rank_waits_in_the_order_of_asking() -> None:
    turns = Turns(lambda: None)
    first, second, third = (turns.ask([0, 1], name) for name in ("one", "two", "three"))
    assert turns.begin(first) == []
    assert turns.begin(second) == ["one"]
    assert turns.begin(third) == ["one", "two"]
    turns.end(first)
    assert turns.begin(third) == ["two"]
    assert turns.begin(second) == []


def test_a_place_can_be_given_up() -> None:
    turns = Turns(lambda: None)
    first, second, third = (turns.ask([0], name) for name in ("one", "two", "three"))
    turns.begin(first)
    turns.end(second)
    assert turns.begin(third) == ["one"]


def test_a_broken_group_is_formed_by_the_last_that_runs_and_nothing_begins_before() -> None:
    seen: list[list[str]] = []
    turns = Turns(lambda: seen.append(turns.begin(waiting)))
    first, second = turns.ask([0], "one"), turns.ask([1], "two")
    turns.begin(first)
    turns.begin(second)
    turns.end(first, broke_group=True)
    assert seen == []  # rank 1 has no time for it
    waiting = turns.ask([0], "three")  # a rank that is free, with a group that is not
    assert turns.begin(waiting) == ["two"]
    turns.end(second)
    assert seen == [["two"]]
    assert turns.begin(waiting) == []


def test_what_mends_the_pool_comes_before_all_that_wait() -> None:
    turns = Turns(lambda: None)
    first, second = turns.ask([0], "one"), turns.ask([0, 1], "two")
    turns.begin(first)
    mending = turns.ask([0, 1], "the replacement", first=True)
    assert turns.mending_waits_for == ("one",)
    assert turns.begin(second) == ["one", "the replacement"]
    turns.end(first)
    assert turns.begin(mending) == []
    assert turns.mending_waits_for == ()


def test_whoever_waits_until_all_is_mended_or_for_a_turn_hears_of_it() -> None:
    turns = Turns(lambda: None)
    mending, waiting = turns.ask([0], "the replacement", first=True), turns.ask([0], "one")
    turns.begin(mending)
    threads = [
        threading.Thread(target=turns.wait_until_mended, daemon=True),
        threading.Thread(target=turns.begin, args=[waiting, None], daemon=True),
    ]
    for thread in threads:
        thread.start()
    assert all(thread.is_alive() for thread in threads)
    turns.end(mending)
    for thread in threads:
        thread.join(SOON_S)
    assert not any(thread.is_alive() for thread in threads)
    assert waiting.began
