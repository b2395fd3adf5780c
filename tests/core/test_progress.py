"""When something that lasts is drawn. The clock is the only thing that is not real."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from gpupool.core import progress
from gpupool.core.progress import Course, Drawing, Progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Seen:
    """What has been drawn, and by how many drawings; `error` is raised then, `drawn` is set."""

    def __init__(self) -> None:
        self.courses: list[Course] = []
        self.num_opened = 0
        self.error: Exception | None = None
        self.drawn = threading.Event()

    def open(self, course: Course) -> Drawing:
        self.num_opened += 1
        return self.draw

    def draw(self, course: Course) -> None:
        self.courses.append(course)
        self.drawn.set()
        if self.error is not None:
            raise self.error


@pytest.fixture
def seen() -> Iterator[Seen]:
    before = progress._opening[0]
    seen = Seen()
    progress.draw_with(seen.open)
    yield seen
    progress.draw_with(before)


def test_it_is_drawn_after_a_second_five_times_a_second_at_most_and_once_at_its_end(
    seen: Seen,
) -> None:
    clock = Clock()
    bar = Progress("Checking", 3000, "images", clock)
    for done in range(3000):
        clock.now = done / 1000
        bar.update(done)
        bar.tick()
        assert clock.now >= 1 or seen.num_opened == 0
    bar.update(3000)
    bar.close()
    bar.close()
    bar.tick()
    assert [round(c.elapsed_s, 3) for c in seen.courses[:3]] == [1.0, 1.2, 1.4]
    assert len(seen.courses) == 11
    assert [course.is_over for course in seen.courses] == [False] * 10 + [True]
    last = Course("Checking", 3000, 3000, "images", "", 2.999, True)
    assert (seen.courses[-1], seen.num_opened) == (last, 1)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_or_a_stop_ends_it_and_goes_on(seen: Seen, error: type[BaseException]) -> None:
    def work() -> None:
        with progress.progress("Listing", unit="files") as bar:
            bar.update(7)
            assert seen.drawn.wait(30)  # by a thread: nothing more is reported
            raise error

    with pytest.raises(error):
        work()
    assert (seen.courses[-1].is_over, seen.courses[-1].done) == (True, 7)


@pytest.mark.parametrize(("error", "num_logged"), [(BrokenPipeError(), 0), (KeyError("x"), 1)])
def test_a_drawing_that_fails_never_costs_the_work(
    seen: Seen, caplog: pytest.LogCaptureFixture, error: Exception, num_logged: int
) -> None:
    clock, seen.error = Clock(), error
    bar = Progress("Listing", clock=clock)
    with caplog.at_level(logging.ERROR, "gpupool"):
        for clock.now in (1.0, 2.0, 3.0):
            bar.tick()
        bar.close()
    assert len(seen.courses) == 1
    ours = [record for record in caplog.records if record.name == "gpupool"]
    assert len(ours) == num_logged
