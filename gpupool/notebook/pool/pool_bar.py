"""The bars of a pool in a notebook: still HTML, and what brings it to life. Runs on the client.

The HTML is what a saved notebook keeps. A model without a view (`pool_buttons.py`,
`static/pool_bar.js`) puts buttons and the countdown into it.
"""

from __future__ import annotations

import importlib
import logging
import queue
import secrets
import threading
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython
from IPython.display import display

from gpupool.core.errors import GpuPoolError
from gpupool.notebook.pool.bar import bar_of, status_html, status_text
from gpupool.pool import session
from gpupool.pool.status import PoolStatus

if TYPE_CHECKING:
    from gpupool.notebook.pool.pool_buttons import Meant
    from gpupool.pool.pool import Pool

    Press = tuple[str, Meant]

SHUT_DOWN = "shut down with the button of its bar"

_LOOK_S = 0.5  # how often the state of the pool is looked at while a page shows it
_LOOK_UNSEEN_S = 5.0  # ... and while none does

_INTERRUPTED = "Interrupted; waiting until the ranks have ended."
_TOO_LATE = "It had already finished; nothing was interrupted."

# Weak: a bar must not keep a pool alive that nobody has any more.
_bars: weakref.WeakKeyDictionary[Pool, PoolBar] = weakref.WeakKeyDictionary()


def show(pool: Pool, handle: Any = None) -> None:
    """Show the bar of `pool` as an output of the running cell, in a notebook.

    Args:
        handle: of a display whose place it takes.
    """
    bar = _bars.get(pool)
    if bar is None:
        bar = _bars[pool] = PoolBar(pool)
    bar.show(pool.status(), handle)


def interrupt_button() -> str:
    """The place of an Interrupt button of the pool that runs, which its bar's model fills.

    "" where no page has a bar of it.
    """
    pool = session.find()
    bar = _bars.get(pool) if pool is not None else None
    return f'<span class="gpupool-interrupt-{bar.uid}"></span>' if bar else ""


def load() -> None:
    """Import what a bar needs, ipywidgets too; nothing where that is done."""
    importlib.import_module("gpupool.notebook.pool.pool_buttons")


class PoolBar:
    """All bars of one pool; they always show the same."""

    def __init__(self, pool: Pool) -> None:
        from gpupool.notebook.pool.pool_buttons import PoolButtons

        self.uid = secrets.token_hex(4)
        self._presses: queue.SimpleQueue[Press] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._handles: dict[str, Any] = {}
        self._drawn: PoolStatus | None = None
        self.num_cells = 0  # that have begun since
        shell: Any = get_ipython()
        self._events = shell.events
        self._events.register("pre_run_cell", self._count_cell)
        self.buttons = PoolButtons(self.uid, lambda press, meant: self._presses.put((press, meant)))
        pool.add_listener(self.draw)
        threading.Thread(
            target=_live, args=[weakref.ref(pool), self], name="gpupool-bar", daemon=True
        ).start()

    def show(self, status: PoolStatus, handle: Any = None) -> None:
        """One more bar, in the running cell."""
        with self._lock:
            bundle = self._bundle(status)
            if handle is None:
                # One display id for all bars of the pool: an update reaches each of them.
                handle = display(bundle, raw=True, display_id=f"gpupool-bar-{self.uid}")
            else:
                handle.update(bundle, raw=True)
            self._handles[handle.display_id] = handle
            self._drawn = status
        self._tell(status, "")

    def draw(self, status: PoolStatus, note: str = "") -> None:
        """Bring all bars up to date: from any thread, at any rate.

        That a cell runs is not drawn into the HTML, where it would stay in the saved notebook;
        that it does not run any more is.
        """
        with self._lock:
            still = replace(status, state="idle") if status.state == "busy" else status
            if self._drawn is None or _lasting(still) != _lasting(self._drawn):
                self._drawn = still
                for handle in self._handles.values():
                    handle.update(self._bundle(still), raw=True)
        self._tell(status, note)

    def next_press(self) -> Press:
        """The button that has been pressed; "" when it is time to look at the pool again."""
        try:
            return self._presses.get(timeout=_LOOK_S if self.buttons.is_seen else _LOOK_UNSEEN_S)
        except queue.Empty:
            return "", None

    def close(self) -> None:
        """Count cells no more."""
        self._events.unregister("pre_run_cell", self._count_cell)

    def _count_cell(self, _info: object) -> None:
        self.num_cells += 1

    def _tell(self, status: PoolStatus, note: str) -> None:
        self.buttons.tell(bar_of(status), note, (self.num_cells, *status.calls))

    def _bundle(self, status: PoolStatus) -> dict[str, str]:
        return {"text/plain": status_text(status), "text/html": status_html(status, self.uid)}


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
        press, meant = bar.next_press()
        if press and (pool := reference()) is not None:
            noted = pool.status().calls
            note = _act(pool, press, meant, bar)
            del pool
    bar.close()


def _act(pool: Pool, press: str, meant: Meant, bar: PoolBar) -> str:
    """Do what a button says; returns what the bar says of it until other calls run, or none."""
    try:
        if press == "interrupt":
            bar.draw(pool.status(), "Interrupting …")
            if pool.interrupt(_calls(meant, bar)):
                return _INTERRUPTED
            return _TOO_LATE if pool.status().calls else ""
        if press == "stop":
            bar.draw(pool.status(), "Shutting down …")
            pool.stop(SHUT_DOWN)
    except GpuPoolError as error:
        return str(error)
    except Exception as error:  # the bar has to continue, and is the only place that can say it
        logging.getLogger("gpupool").exception("the button %s failed", press)
        return f"{press} failed: {error!r}"
    return ""


def _calls(meant: Meant, bar: PoolBar) -> tuple[int, ...] | None:
    """Which calls to interrupt; None: whichever run, as no cell has begun since the press.

    A cell may make many short ones: those that the page knew of are over when the press is heard.
    """
    if meant is None or meant[0] == bar.num_cells:
        return None
    return meant[1:]


def _lasting(status: PoolStatus) -> PoolStatus:
    """A status without what changes every moment."""
    return replace(status, idle_left_s=float(status.stops_soon), calls=())
