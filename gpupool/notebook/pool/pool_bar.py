"""A pool that starts, and its bars: HTML that stays, and what brings it to life. Client."""

from __future__ import annotations

import contextlib
import importlib
import logging
import queue
import threading
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

from gpupool.core.errors import GpuPoolError
from gpupool.core.progress import Progress
from gpupool.notebook.page.front_end import Place, in_notebook
from gpupool.notebook.pool.bar import bar_html, countdown, parts_of, status_html, status_text
from gpupool.pool import session
from gpupool.pool.notices import NoticeLines
from gpupool.pool.status import PoolStatus

if TYPE_CHECKING:
    from gpupool.notebook.page.live_html import Meant
    from gpupool.pool.pool import Pool

_SHUT_DOWN = "shut down with the button of its bar"
_GONE = "The kernel of this notebook has ended, and the pool with it."
_LOOK_S = 0.5  # how often the state of the pool is looked at

# Weak: a bar must not keep a pool alive that nobody has any more.
_bars: weakref.WeakKeyDictionary[Pool, PoolBar] = weakref.WeakKeyDictionary()


def show(pool: Pool, place: Place | None = None) -> None:
    """Show the bar of `pool` as an output of the running cell, in a notebook.

    Args:
        place: an output whose place it takes.
    """
    bar = _bars.get(pool)
    if bar is None:
        bar = _bars[pool] = PoolBar(pool)
    bar.show(pool.status(), Place() if place is None else place)


def interrupt_button() -> str:
    """The place of an Interrupt button of the pool that runs, which its bar's model fills.

    "" where no page has a bar of it.
    """
    pool = session.find()
    bar = _bars.get(pool) if pool is not None else None
    return bar.live.part("interrupt") if bar else ""


class PoolBar:
    """All bars of one pool; they always show the same."""

    def __init__(self, pool: Pool) -> None:
        from gpupool.notebook.page.live_html import LiveHtml

        self.presses: queue.SimpleQueue[tuple[str, Meant]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._places: list[Place] = []
        self._drawn: PoolStatus | None = None
        self._shell: Any = get_ipython()
        self.live = LiveHtml(lambda press, meant: self.presses.put((press, meant)))
        pool.add_listener(self.draw)
        threading.Thread(
            target=_live, args=[weakref.ref(pool), self], name="gpupool-bar", daemon=True
        ).start()

    def show(self, status: PoolStatus, place: Place) -> None:
        """One more bar, in the running cell."""
        with self._lock:
            self._places.append(place)
            self._drawn = None
        self.draw(status)

    def draw(self, status: PoolStatus, note: str = "") -> None:
        """Bring all bars up to date: from any thread, at any rate.

        That a cell runs is not drawn into the outputs, where it would stay in the saved notebook;
        that it does not run any more is.
        """
        with self._lock:
            if _lasting(status) != self._drawn:
                self._drawn = _lasting(status)
                for place in self._places:
                    place.show(self._bundle(status))
        self._tell(status, note)

    def calls(self, meant: Meant) -> tuple[int, ...] | None:
        """Which calls to interrupt; None: whichever run, as no cell has begun since the press.

        A cell may make many short ones: those that the page knew of are over when it is heard.
        """
        return None if meant[:1] in ((), (self._shell.execution_count,)) else meant[1:]

    def _tell(self, status: PoolStatus, note: str) -> None:
        if status.state == "stopped":
            self.live.tell(parts={"buttons": "", "interrupt": ""}, still=self._bundle(status))
            return
        self.live.tell(
            parts={**parts_of(status), **_buttons(status, note)},
            gone=parts_of(replace(status, state="stopped", reason=_GONE)),
            meant=(self._shell.execution_count, *status.calls),
        )

    def _bundle(self, status: PoolStatus) -> dict[str, str]:
        if status.state == "stopped":
            html = status_html(status)
        else:
            html = bar_html(_idle(status), self.live.part)
        return {"text/plain": status_text(_idle(status)), "text/html": html}


def _idle(status: PoolStatus) -> PoolStatus:
    return replace(status, state="idle") if status.state == "busy" else status


def _lasting(status: PoolStatus) -> PoolStatus:
    """A status without what changes every moment."""
    return replace(_idle(status), idle_left_s=float(status.stops_soon), calls=())


def _buttons(status: PoolStatus, note: str) -> dict[str, str]:
    """Those of the bar, and the one beside a cell that hangs."""
    from gpupool.notebook.page.live_html import button, hint

    is_busy, said = status.state == "busy", hint(note)
    title = "Interrupt what runs on the ranks; variables are kept"
    stop = button("stop", "Shut down", title="End every process of the pool", looks="gpl-grave")
    beside = button("interrupt", "Interrupt", title=title, looks="gpl-kernel gpl-now")
    title = title if is_busy else "Nothing runs on the ranks"
    interrupt = button("interrupt", "Interrupt", title=title, off=not is_busy)
    return {"buttons": f"{interrupt} {stop}{said}", "interrupt": beside + said}


def _live(reference: weakref.ref[Pool], bar: PoolBar) -> None:
    """Do what the buttons ask for, and show what becomes of the pool, until its end."""
    note = ""
    noted: tuple[int, ...] = ()  # what ran when it was noted
    while (pool := reference()) is not None:
        status = pool.status()
        if status.calls != noted:
            note = ""
        bar.draw(status, note)
        if status.state == "stopped":
            break
        del pool
        with contextlib.suppress(queue.Empty):
            press, meant = bar.presses.get(timeout=_LOOK_S)
            if (pool := reference()) is not None:
                noted = pool.status().calls
                note = _act(pool, press, meant, bar)
                del pool


def _act(pool: Pool, press: str, meant: Meant, bar: PoolBar) -> str:
    """Do what a button says; returns what the bar says of it until other calls run, or none."""
    try:
        if press == "interrupt":
            bar.draw(pool.status(), "Interrupting …")
            if pool.interrupt(bar.calls(meant)):
                return "Interrupted; waiting until the ranks have ended."
            return "It had already finished; nothing was interrupted." * bool(pool.status().calls)
        if press == "stop":
            bar.draw(pool.status(), "Shutting down …")
            pool.stop(_SHUT_DOWN)
    except GpuPoolError as error:
        return str(error)
    except Exception as error:  # the bar has to continue, and is the only place that can say it
        logging.getLogger("gpupool").exception("the button %s failed", press)
        return f"{press} failed: {error!r}"
    return ""


# ---- a pool that starts --------------------------------------------------------------------------


class StartProgress:
    """A line that says how far the start is, and since when; the pool's bar takes its place."""

    def __init__(self, what: str = "Starting the pool") -> None:
        self._place: Place | None = None
        self._line, self._began = Progress(what), False
        if in_notebook():
            from gpupool.notebook.page.progress_view import NotebookBar  # with tqdm

            self._place = Place()
            self._line = Progress(what, after_s=0, draw=NotebookBar(self._place))

    def __enter__(self) -> StartProgress:
        return self

    def __call__(self, line: str) -> None:
        """Show a stage."""
        self._line.tell(line)
        if not self._began:  # not before: a start that is refused at once has no line
            self._began = True
            self._line.tick()
            self._line.start()
            if self._place is not None:
                # while the processes come up, not when they are there
                importlib.import_module("gpupool.notebook.page.live_html")

    def finish(self, text: str, pool: Pool | None = None) -> None:
        """Show a text instead, or a pool; of that from now on also what becomes of it."""
        self._line.close()
        if self._place is None:
            print(text)
            if pool is not None:
                pool.add_listener(_tell_on_terminal)
        elif pool is not None:
            show(pool, self._place)
        else:
            self._place.show({"text/plain": text})

    def __exit__(self, *_: object) -> None:
        self._line.close()


def start_unasked() -> Pool:
    """Start a pool because a cell needs one, and say so in one line."""
    with StartProgress() as progress:
        pool, line = session.start_unasked(progress)
        progress.finish(line)
    return pool


def _tell_on_terminal(status: PoolStatus) -> None:
    """A line about what the user has not asked for, where a bar cannot be drawn again."""
    if status.stops_soon:
        NoticeLines()(f"the pool {countdown(status)}.")
    elif status.state == "stopped" and status.reason:
        NoticeLines()(f"the pool was {status.reason}.")
