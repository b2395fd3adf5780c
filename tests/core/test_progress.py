"""When something that lasts is drawn. The clock is the only thing that is not real."""

from __future__ import annotations

import logging
import threading

import pytest

from gpupool.core import progress
from gpupool.core.progress import Drawing, Progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


class Seen:
    """What was drawn (done, elapsed_s, is_over), by how many drawings; `error` is raised then."""

    def __init__(self) -> None:
        self.states: list[tuple[int, float, bool]] = []
        self.num_opened = 0
        self.error: Exception | None = None
        self.drawn = threading.Event()

    def open(self) -> Drawing:
        self.num_opened += 1
        return self.draw

    def draw(self, bar: Progress) -> None:
        self.states.append((bar.done, bar.elapsed_s, bar.is_over))
        self.drawn.set()
        if self.error is not None:
            raise self.error


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen = Seen()
    monkeypatch.setattr(progress, "_open", seen.open)
    return seen


def test_it_is_drawn_after_a_second_five_times_a_second_at_most_and_once_at_its_end(
    seen: Seen, clock: Clock
) -> None:
    bar = Progress("Checking", 3000, "images")
    for done in range(3000):
        clock.now = done / 1000
        bar.update(done)
        bar.tick()
        assert clock.now >= 1 or seen.num_opened == 0
    bar.update(3001)
    bar.close()
    bar.close()
    bar.tick()
    assert [round(elapsed_s, 3) for _, elapsed_s, _ in seen.states[:3]] == [1.0, 1.2, 1.4]
    assert len(seen.states) == 11
    assert [is_over for _, _, is_over in seen.states] == [False] * 10 + [True]
    assert (seen.states[-1], seen.num_opened) == ((3000, 2.999, True), 1)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_or_a_stop_ends_it_and_goes_on(seen: Seen, error: type[BaseException]) -> None:
    def work() -> None:
        with progress.progress("Listing", unit="files") as bar:
            bar.update(7)
            assert seen.drawn.wait(30)  # by a thread: nothing more is reported
            raise error

    with pytest.raises(error):
        work()
    done, _, is_over = seen.states[-1]
    assert (is_over, done) == (True, 7)


@pytest.mark.parametrize(("error", "num_logged"), [(BrokenPipeError(), 0), (KeyError("x"), 1)])
def test_a_drawing_that_fails_never_costs_the_work(
    seen: Seen,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    num_logged: int,
) -> None:
    seen.error = error
    bar = Progress("Listing")
    with caplog.at_level(logging.ERROR, "gpupool"):
        for clock.now in (1.0, 2.0, 3.0):
            bar.tick()
        bar.close()
    assert len(seen.states) == 1
    ours = [record for record in caplog.records if record.name == "gpupool"]
    assert len(ours) == num_logged
