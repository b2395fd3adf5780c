"""A pool that starts, and its bars: HTML that stays, and what brings it to life. Client."""

from __future__ import annotations

import contextlib
import importlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

from gpupool.core.formatting import NONE, duration, format_ranks
from gpupool.core.machine.topology import Rank
from gpupool.core.progress import Progress
from gpupool.notebook.page import markup
from gpupool.notebook.page.front_end import Place, in_notebook
from gpupool.pool import session
from gpupool.pool.status import PoolStatus

if TYPE_CHECKING:
    from gpupool.notebook.page.live_html import Meant
    from gpupool.pool.pool import Pool

_COLOURS = {
    "idle": markup.GREEN,
    "busy": markup.AMBER,
    "replacing": markup.AMBER,
    "broken": markup.RED,
    "stopped": markup.GREY,
}
_RANK_COLUMNS = ("rank", "device", "threads", "pid")
_PILL = "border:1px solid;border-radius:10px;padding:0 8px;white-space:nowrap"
_NUM_NAMES = 3  # so many variables are named in the bar itself, more only in its details

Part = Callable[[str, str], str]  # (name, HTML within) -> element

_SHUT_DOWN = "shut down with the button of its bar"
_GONE = "The kernel of this notebook has ended, and the pool with it."
_LOOK_S = 0.5  # how often the state of the pool is looked at
_SOON_S = 0.2  # a start that is refused at once has no line

# Weak: a bar must not keep a pool alive that nobody has any more.
_bars: weakref.WeakKeyDictionary[Pool, PoolBar] = weakref.WeakKeyDictionary()


# ---- as text and HTML ----------------------------------------------------------------------------


def status_text(status: PoolStatus) -> str:
    is_up = status.state in ("idle", "busy")
    when = "no idle timeout" if status.idle_left_s is None else countdown(status) * is_up
    facts = _facts(status, status.credentials, when)
    lines = [f"{_title(status)}: {status.state}, {', '.join(facts)}"]
    if status.reason:
        lines.append(status.reason)
    for rank, device, threads, pid in rank_rows(status):
        plural = "" if threads == "1" else "s"
        process = "no process" if pid == NONE else f"pid {pid}"
        lines.append(f"  rank {rank}  {device}  {threads} thread{plural}  {process}")
    return "\n".join(lines)


def bar_html(status: PoolStatus, part: Part = lambda _name, inner: inner) -> str:
    """The bar of a pool, of elements that `part` makes: its "head", place for "buttons", "rest"."""
    parts = parts_of(status)
    row = part("head", parts["head"]) + part("buttons", "")
    row = f'<div style="display:flex;flex-wrap:wrap;align-items:center;gap:4px 8px">{row}</div>'
    return (
        f'<div class="gpupool-bar gpl-frame" style="{markup.CARD}">{row}'
        f"{part('rest', parts['rest'])}</div>"
    )


def parts_of(status: PoolStatus) -> dict[str, str]:
    """What the bar shows. It stays true in a saved notebook: it counts down only near the end."""
    colour = edge = _COLOURS[status.state]
    notice = status.reason
    if status.stops_soon:
        notice = f"{notice}\nThe pool {countdown(status)}.".lstrip()
        edge = markup.AMBER if status.state == "idle" else edge
    limit = status.idle_timeout_s
    when = "no idle timeout" if limit is None else f"shuts down after {_minutes(limit)} idle"
    facts = _facts(status, when)
    head = (
        f'<span style="color:{colour}">●</span> <b>{escape(_title(status))}</b> '
        f'<span class="gpb-state" style="{_PILL};border-color:{colour}">{status.state}</span> '
        f'<span style="opacity:.75">{escape(" · ".join(facts))}</span>'
    )
    rest = (
        f'<div style="border-left:3px solid {edge};padding-left:10px;margin:6px 0 0;'
        f'white-space:pre-wrap{"" if notice else ";display:none"}">{escape(notice)}</div>'
        '<details class="gpb-details" style="margin:4px 0 0">'
        '<summary style="cursor:pointer">Details</summary>'
        f"{markup.scroller(_details(status), 'Details of the pool')}</details>"
    )
    return {"head": head, "rest": rest}


def rank_rows(status: PoolStatus) -> list[tuple[str, str, str, str]]:
    return [
        (
            format_ranks([rank.rank], {rank.rank: rank.host}),
            _device(rank, status),
            str(rank.num_threads),
            str(status.pids.get(rank.rank, NONE)),
        )
        for rank in status.ranks
    ]


def countdown(status: PoolStatus) -> str:
    return f"shuts down in {_minutes(status.idle_left_s or 0.0)} if idle"


def _title(status: PoolStatus) -> str:
    hosts = {rank.host for rank in status.ranks if rank.host}
    plural = "s" * (len(hosts) > 1)
    return f"Pool of {len(status.ranks)}" + f" on {len(hosts)} host{plural}" * bool(hosts)


def _facts(status: PoolStatus, *more: str) -> list[str]:
    if status.state == "stopped":
        return [_devices(status), status.backend]
    env = f"{len(status.env)} variables" if len(status.env) > _NUM_NAMES else ", ".join(status.env)
    env = f"env: {env} (hidden)" if status.env else ""
    backend, training = status.backend, status.training_backend
    backend += f" (training: {training})" if training != backend else ""
    return [fact for fact in (_devices(status), backend, env, *more) if fact]


def _details(status: PoolStatus) -> str:
    more = [f"process group formed {status.generation} time{'s' * (status.generation != 1)}"]
    more += [f"env: {', '.join(status.env)} (values hidden)"] if status.env else []
    more += [status.credentials] if status.credentials else []
    return markup.table(_RANK_COLUMNS, rank_rows(status)) + markup.muted(" · ".join(more))


def _minutes(seconds: float) -> str:
    return f"{round(seconds / 60)} min" if seconds >= 90 else duration(round(seconds))


def _devices(status: PoolStatus) -> str:
    names = sorted({rank.gpu.name for rank in status.ranks if rank.gpu})
    if not names:
        return f"CPU ranks: {status.why_cpu}" if status.why_cpu else "CPU ranks"
    spare = len(status.ranks) - len(status.training_ranks)
    shown = f"one engine per GPU ({', '.join(names)})"
    others = f", {spare} CPU rank{'s' * (spare > 1)} (not used for training)"
    return shown + others * bool(spare)


def _device(rank: Rank, status: PoolStatus) -> str:
    if rank.gpu is not None:
        return f"{rank.gpu.label}: {rank.gpu.name}"
    return "CPU" if rank.rank in status.training_ranks else "CPU (not used for training)"


# ---- live ----------------------------------------------------------------------------------------


def show(pool: Pool, place: Place | None = None) -> None:
    """Show the bar of `pool` in a notebook: in the running cell, or in the place of an output."""
    bar = _bars.get(pool)
    if bar is None:
        bar = _bars[pool] = PoolBar(pool)
    bar.show(pool.status(), Place() if place is None else place)


def interrupt_button() -> str:
    """The place of an Interrupt button, which the bar's model fills; "" where there is no bar."""
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
        is_over = status.state == "stopped"
        html = bar_html(status) if is_over else bar_html(_idle(status), self.live.part)
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
        note = note if status.calls == noted else ""
        bar.draw(status, note)
        if status.state == "stopped":
            break
        del pool
        with contextlib.suppress(queue.Empty):
            press, meant = bar.presses.get(timeout=_LOOK_S)
            if (pool := reference()) is not None:
                noted = pool.status().calls
                note = _act(pool, press, bar, meant)
                del pool


def _act(pool: Pool, press: str, bar: PoolBar, meant: Meant) -> str:
    """Do what a button says; returns what the bar says of it."""
    try:
        if press == "interrupt":
            bar.draw(pool.status(), "Interrupting …")
            if pool.interrupt(bar.calls(meant)):
                return "Interrupted; waiting until the ranks have ended."
            return "It had already finished; nothing was interrupted." * bool(pool.status().calls)
        if press == "stop":
            bar.draw(pool.status(), "Shutting down …")
            pool.stop(_SHUT_DOWN)
    except Exception as error:  # the bar has to continue, and is the only place that can say it
        logging.getLogger("gpupool").exception("the button %s failed", press)
        return f"{press} failed: {error}"
    return ""


# ---- a pool that starts --------------------------------------------------------------------------


class StartProgress(contextlib.AbstractContextManager["StartProgress"]):
    """A line that says how far the start is, and since when; the pool's bar takes its place."""

    def __init__(self, what: str = "Starting the pool") -> None:
        self._place = Place() if in_notebook() else None
        self._line = Progress(what)
        if self._place is not None:
            from gpupool.notebook.page.progress_view import NotebookBar  # with tqdm

            self._line = Progress(what, after_s=_SOON_S, draw=NotebookBar(self._place))
        self._line.start()

    def __call__(self, line: str) -> None:
        self._line.tell(line)
        if self._place is not None:
            # while the processes come up, not when they are there
            importlib.import_module("gpupool.notebook.page.live_html")

    def finish(self, text: str, pool: Pool | None = None) -> None:
        """Show a text instead, or a pool; of that from now on also what becomes of it."""
        self._line.close()
        if self._place is None:
            print(text)
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
