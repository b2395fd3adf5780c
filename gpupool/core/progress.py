"""How far something is that may last: counted here, drawn elsewhere. Runs anywhere.

    with progress("Listing", unit="files") as bar:
        for done, page in enumerate(pages):
            bar.update(done)

What is over within a second is never drawn, unless that is asked for. What draws is said once for a
process, by `draw_with`: a bar of the notebook or a line of the terminal
(`gpupool/notebook/page/progress_view.py`), or on an engine an event to the notebook
(`gpupool/engine/output/emit.py`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

AFTER_S = 1.0  # what is over sooner needs no bar
EVERY_S = 0.2

BYTES = "B"  # the unit that is written as MB, GB


@dataclass(slots=True)
class Course:
    """How far one thing is, at one moment.

    `what` says what happens ("Listing"), `note` which part of it ("" if it has none). `total` is
    None where no end is known, `unit` what is counted ("files", `BYTES`, "" for nothing). On
    engines only the first rank reports it, unless it is `on_any_rank`.
    """

    what: str
    done: int
    total: int | None
    unit: str
    note: str
    elapsed_s: float
    is_over: bool = False
    on_any_rank: bool = False


Drawing = Callable[[Course], None]
"""Draws a course as it is now: called one at a time, the last time when it is over."""
Opening = Callable[[Course], Drawing | None]
_opening: list[Opening] = []


def draw_with(opening: Opening) -> None:
    """Have `opening(course)` give what draws a course, or None for nothing, from now on.

    It is called when a course has lasted for a second, in a thread that the code which lasts has
    started.
    """
    _opening[:] = [opening]


class Progress:
    """One thing that may last. Any thread may call its methods; they cost next to nothing.

    Nothing that goes wrong with the drawing reaches the caller.

    Args:
        elapsed_s: so long it lasts already.
        on_any_rank: see `Course`.
        after_s: what is over sooner is not drawn.
        draw: what draws it, in the place of what the process draws with.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        unit: str = "",
        clock: Callable[[], float] = time.monotonic,
        elapsed_s: float = 0.0,
        on_any_rank: bool = False,
        after_s: float = AFTER_S,
        draw: Drawing | None = None,
    ) -> None:
        self._course = Course(what, 0, total, unit, "", 0.0, on_any_rank=on_any_rank)
        self._clock = clock
        self._began_at = clock() - elapsed_s
        self._next_at = self._began_at + after_s
        self._drawing = draw
        self._lock = threading.Lock()
        self._over = threading.Event()

    def update(self, done: int, total: int | None = None) -> None:
        """So many are done, of so many; None: of as many as was said before."""
        self._course.done = done
        if total is not None:
            self._course.total = total

    def advance(self, number: int = 1, *, and_tick: bool = False) -> None:
        """So many more are done; `and_tick` draws it in this thread, if it is time."""
        with self._lock:
            self._course.done += number
        if and_tick:
            self.tick()

    def tell(self, note: str) -> None:
        """Which part of it runs."""
        self._course.note = note

    def start(self) -> None:
        """Draw automatically from now on, in a thread of its own, until `close`."""
        # one for each: a notebook puts what a thread shows to the cell that has started it
        threading.Thread(target=self._run, name="gpupool-progress", daemon=True).start()

    def tick(self) -> None:
        """Draw it, if it is time."""
        with self._lock:
            if not self._over.is_set() and self._clock() >= self._next_at:
                self._next_at = self._clock() + EVERY_S
                self._draw()

    def close(self) -> None:
        """It is over: what was drawn goes away. May be called again."""
        with self._lock:
            was_over = self._over.is_set()
            self._over.set()
            if self._drawing is not None and not was_over:
                self._draw()

    def _run(self) -> None:
        wait_s = max(0.0, self._next_at - self._clock())
        while not self._over.wait(wait_s):
            self.tick()
            wait_s = EVERY_S

    def _draw(self) -> None:
        elapsed_s, done = self._clock() - self._began_at, self._course.done
        done = min(done, self._course.total or done)  # a last batch is smaller
        course = replace(self._course, done=done, elapsed_s=elapsed_s, is_over=self._over.is_set())
        try:
            if self._drawing is None and _opening and not _is_worker():
                self._drawing = _opening[0](course)
            if self._drawing is not None:
                self._drawing(course)
                return
        except (OSError, ValueError):  # a stream that was closed: nobody looks any more
            pass
        except Exception:  # a bar is no reason for the work to fail
            logging.getLogger("gpupool").exception("progress could not be drawn")
        self._drawing, self._next_at = None, math.inf


@contextlib.contextmanager
def progress(
    what: str,
    total: int | None = None,
    unit: str = "",
    *,
    after_s: float = AFTER_S,
) -> Iterator[Progress]:
    """Show how far the block is, if it lasts for more than a second.

    Args:
        what: what it does: "Listing", "Sending x".
        total: how many there are to do, if that is known already.
        unit: what is counted: "files"; `BYTES`; "" for what has no number.
        after_s: see `Progress`.
    """
    bar = Progress(what, total, unit, after_s=after_s)
    bar.start()
    try:
        yield bar
    finally:
        bar.close()


def _is_worker() -> bool:
    """Whether this is a worker process of torch or of the user's: it has nobody to draw for."""
    known = sys.modules.get("multiprocessing.process")
    return known is not None and known.parent_process() is not None
