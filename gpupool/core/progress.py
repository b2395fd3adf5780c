"""How far something is that may last: counted here, drawn elsewhere. Runs anywhere.

    with progress("Listing", unit="files") as bar:
        for done, page in enumerate(pages):
            bar.update(done)

What is over within a second is never drawn. What draws is said once for a process, by `draw_with`:
a bar of the notebook or a line of the terminal (`gpupool/notebook/page/progress_view.py`), or on an
engine an event to the notebook (`gpupool/engine/output/emit.py`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator

AFTER_S = 1.0  # what is over sooner needs no bar
EVERY_S = 0.2

BYTES = "B"  # the unit that is written as MB, GB


class Progress:
    """One thing that may last. Any thread may call its methods; they cost next to nothing.

    `what` happens ("Listing"), and the `note` says to which part. `total` is None where no end is
    known; the `unit` is "files", `BYTES`, or "" of what has no number. It has lasted `elapsed_s`,
    and is drawn after `after_s`, by `draw` or what the process draws with. On engines only the
    first rank reports what is not `on_any_rank`.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        unit: str = "",
        *,
        elapsed_s: float = 0.0,
        on_any_rank: bool = False,
        after_s: float = AFTER_S,
        draw: Drawing | None = None,
    ) -> None:
        self.what, self.total, self.unit, self.note = what, total, unit, ""
        self.on_any_rank = on_any_rank
        self._done = 0
        self._began_at = time.monotonic() - elapsed_s
        self._next_at = self._began_at + after_s
        self._drawing = draw
        self._lock = threading.Lock()
        self._over = threading.Event()

    @property
    def done(self) -> int:
        return min(self._done, self.total or self._done)  # a last batch is smaller

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_at

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def update(self, done: int, total: int | None = None) -> None:
        """`total` is given where it has changed."""
        self._done, self.total = done, self.total if total is None else total

    def advance(self, number: int = 1) -> None:
        with self._lock:
            self._done += number

    def tell(self, note: str) -> None:
        self.note = note

    def start(self) -> None:
        """Draw automatically from now on, in a thread of its own, until `close`."""
        # one for each: a notebook puts what a thread shows to the cell that has started it
        threading.Thread(target=self._run, name="gpupool-progress", daemon=True).start()

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            self.tick()

    def tick(self) -> None:
        with self._lock:
            if not self.is_over and time.monotonic() >= self._next_at:
                self._next_at = time.monotonic() + EVERY_S
                self._draw()

    def close(self) -> None:
        """It is over: what was drawn goes away. May be called again."""
        with self._lock:
            was_over = self.is_over
            self._over.set()
            if self._drawing is not None and not was_over:
                self._draw()

    def _draw(self) -> None:
        from multiprocessing import parent_process  # not sooner: it takes 13 ms

        try:
            # A worker process, of torch or of the user's, has nobody to draw for.
            if self._drawing is None and _open is not None and parent_process() is None:
                self._drawing = _open()
            if self._drawing is not None:
                self._drawing(self)
                return
        except Exception as error:  # a bar is no reason for the work to fail
            if not isinstance(error, OSError | ValueError):  # a stream that was closed
                logging.getLogger("gpupool").exception("progress could not be drawn")
        self._drawing, self._next_at = None, math.inf


Drawing = Callable[[Progress], object]
"""Draws it as it is now: called one at a time, the last time when it is over."""
_open: Callable[[], Drawing | None] | None = None


def draw_with(opening: Callable[[], Drawing | None]) -> None:
    """From now on `opening` gives what draws a thing, or None. That thing's own thread calls it."""
    global _open
    _open = opening


@contextlib.contextmanager
def progress(what: str, total: int | None = None, unit: str = "") -> Iterator[Progress]:
    """Show how far the block is, if it lasts for more than a second: see `Progress`."""
    with contextlib.closing(Progress(what, total, unit)) as bar:
        bar.start()
        yield bar
