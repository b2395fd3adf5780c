"""What is done about ranks that do not end, and when. Pure; the clock is an argument."""

from __future__ import annotations

from gpupool.pool.calls.freeing import ABORT_S, AGAIN_S, GRACE_S, KILL_S, WARN_S, Ladder, Rung

MOMENT = 0.01


def steps(ladder: Ladder, *moments: tuple[float, int]) -> list[list[Rung]]:
    return [ladder.due(100 + at, presses) for at, presses in moments]


def test_after_an_error_the_others_have_a_grace_then_each_rung_comes_once() -> None:
    times = [0, GRACE_S - MOMENT, GRACE_S + MOMENT, GRACE_S + 2 * MOMENT, ABORT_S + MOMENT]
    times += [ABORT_S + 2 * MOMENT, AGAIN_S + MOMENT]
    times += [WARN_S + MOMENT, KILL_S - MOMENT, KILL_S + MOMENT, KILL_S + 1]
    assert steps(Ladder(), *((at, 0) for at in times)) == [
        [], [], [Rung.INTERRUPT], [], [Rung.ABORT], [], [Rung.AGAIN],
        [Rung.WARN], [], [Rung.KILL], [],
    ]  # fmt: skip


def test_a_stop_interrupts_at_once_and_aborts_what_is_left_after_the_grace() -> None:
    found = steps(Ladder(), (0, 1), (MOMENT, 1), (ABORT_S + MOMENT, 1))
    assert found == [[Rung.INTERRUPT], [], [Rung.ABORT]]


def test_to_press_again_does_nothing_before_the_warning_and_agrees_after_it() -> None:
    found = steps(Ladder(), (0, 1), (0.1, 5), (WARN_S + MOMENT, 5), (4, 5), (5, 6), (6, 7))
    assert found[1] == []
    assert found[2] == [Rung.ABORT, Rung.AGAIN, Rung.WARN]
    assert found[3:] == [[], [Rung.KILL], []]


def test_a_stop_after_an_error_still_interrupts() -> None:
    found = steps(Ladder(), (0, 0), (0.1, 1), (GRACE_S + MOMENT, 1))
    assert found == [[], [Rung.INTERRUPT], []]
    found = steps(Ladder(), (0, 0), (GRACE_S + MOMENT, 0), (0.5, 1), (0.6, 2))
    assert found == [[], [Rung.INTERRUPT], [Rung.INTERRUPT, Rung.ABORT], []]


def test_a_late_look_takes_the_steps_that_are_due_and_gives_its_warning_time() -> None:
    ladder = Ladder()
    later = KILL_S + 5
    found = steps(ladder, (0, 0), (later, 0), (later + 1, 0), (later + KILL_S - WARN_S, 0))
    rungs = [Rung.INTERRUPT, Rung.ABORT, Rung.AGAIN, Rung.WARN]
    assert found == [[], rungs, [], [Rung.KILL]]
