"""How a cell is shown: in notebooks a bounded tail while it runs, then groups; in terminals, logs
and trainings lines as they come; its loops as monitors. What it has shown is not shown again.
Runs on the client.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

from gpupool.core.errors import SpmdError
from gpupool.core.formatting import format_ranks
from gpupool.core.monitor_lines import MonitorLines
from gpupool.core.progress import AFTER_S, Progress
from gpupool.core.terminal import shows_colours, write_line
from gpupool.core.wire.events import Event, MonitorEvent, ProgressEvent
from gpupool.core.wire.output import STREAMS, OutputKind
from gpupool.notebook.cells import picture
from gpupool.notebook.cells.lines import Lines
from gpupool.notebook.cells.picture import Bundle, Look, bundle_html, is_embeddable, is_rich
from gpupool.notebook.page import ansi, markup
from gpupool.notebook.page.front_end import Place, has_reader, in_notebook
from gpupool.notebook.pool_bar import interrupt_button
from gpupool.pool.calls.diagnosis import Diagnosis
from gpupool.pool.calls.output import SpmdResult
from gpupool.pool.notices import NoticeLines
from gpupool.spmd.cell import CellReport, States
from gpupool.spmd.output import fold_displays

if TYPE_CHECKING:
    from gpupool.notebook.monitor.curves import LoopHistory
    from gpupool.notebook.monitor.live import LiveMonitor

REDRAW_EVERY_S = 0.25
CLOCK_AFTER_S = 2.0  # a cell that says nothing shows its clock from then on
NUM_TAIL_LINES = 20
MAX_LINE_CHARS = 400  # of the live tail
MAX_CHARS_PER_S = 250_000  # drawn while it runs, figures included


class LiveView:
    """A bounded tail that is drawn again while the cell runs, then the ranks' output in groups.

    What ranks say after the end (threads, workers) is added to the groups, under the same cell.
    """

    def __init__(self, ranks: Sequence[int], look: Look, stop_wish: threading.Event) -> None:
        self._look = look
        self._place = Place()
        self._loops = LoopViews(beside=self._place, stop_wish=stop_wish)
        # Three times what is shown: equal lines of several ranks become one.
        self._lines = Lines(ranks, MAX_LINE_CHARS, 3 * NUM_TAIL_LINES)
        self._figure: tuple[int, Bundle] | None = None  # the newest, of the lowest rank
        # Three threads meet here: of the output, of the cell that waits, and of the timer.
        self._lock = threading.RLock()
        self._began = self._drawn_at = time.monotonic()
        self._drawn_chars = 0
        self._dirty = False
        self._notice: str | None = None
        self._report: CellReport | None = None
        self._timer: threading.Timer | None = None

    def on_output(self, rank: int, kind: OutputKind, content: Any) -> None:
        """Keep the end of the text; drawing is left to `tick`, so that floods cost nothing."""
        if kind is OutputKind.EVENTS:
            self._loops.take(content)
            return
        with self._lock:
            self._dirty = True
            if self._report is None:
                self._note(rank, kind, content)
            elif self._timer is None:  # nobody calls `tick` any more
                wait_s = max(2 * REDRAW_EVERY_S, self._drawn_chars / MAX_CHARS_PER_S)
                self._timer = threading.Timer(wait_s, self._draw_late)
                self._timer.daemon = True  # else a kernel that ends would wait for it
                self._timer.start()

    def notice(self, text: str | None) -> None:
        with self._lock:
            self._notice, self._dirty = text, True

    def tick(self, states: States = dict) -> None:
        self._loops.tick()
        now = time.monotonic()
        # The larger the picture, the rarer: the page and its websocket have to keep up.
        wait_s = max(REDRAW_EVERY_S, self._drawn_chars / MAX_CHARS_PER_S)
        is_news = self._dirty or (now - self._began > CLOCK_AFTER_S and now - self._drawn_at > 1)
        if not is_news or now - self._drawn_at < wait_s:
            return
        with self._lock:
            self._dirty = False
            bundle = self._running(now, states())
        self._drawn_at = now
        # Outside of the lock, so that output is never held up by a slow front end.
        self._show(bundle)

    def finish(self, report: CellReport) -> None:
        # Even if nothing is shown now: late text must appear under this cell, not the next one.
        self._place.bind()
        self._loops.finish()
        with self._lock:
            self._report = report
            self._figure = None
        # A tail that is there must be replaced, also by an empty report.
        self._show_report(always=self._place.is_shown)
        if report.error is not None:
            mark_error_shown(report.error)
        self._show_others(report)
        mark_shown(report.result, values=self._look.show_values)

    def _note(self, rank: int, kind: OutputKind, content: Any) -> None:
        shown_rank, figure = self._figure or (rank, {})
        if kind in STREAMS:
            self._lines.feed(rank, content, time.monotonic())
        elif kind is OutputKind.DISPLAY and not is_rich(content):
            self._lines.end(rank, time.monotonic(), str(content["data"].get("text/plain", "")))
        elif kind in (OutputKind.DISPLAY, OutputKind.UPDATE) and is_embeddable(content):
            is_it = figure.get("transient") == content.get("transient") and rank == shown_rank
            if is_it or (kind is OutputKind.DISPLAY and rank <= shown_rank):
                self._figure = rank, content

    def _running(self, now: float, states: Mapping[int, str]) -> dict[str, str]:
        tail = self._lines.tail(NUM_TAIL_LINES)
        lines = [f"[{format_ranks(ranks)}] {line}" for ranks, line in tail]
        lines += self._lines.bars()[:NUM_TAIL_LINES]
        clock = markup.muted(f"running, {picture.shown_time(now - self._began)}")
        blocks = [picture.states_html(states) + clock]
        if lines:
            blocks.append(markup.code_html("\n".join(map(ansi.to_html, lines))))
        if self._figure is not None:
            rank, figure = self._figure
            blocks.append(markup.bar(f"<b>[{rank}]</b> {bundle_html(figure)}", markup.GREY))
        plain = "\n".join(map(ansi.plain, lines)) or "running"
        if self._notice is not None:
            blocks.append(notice_html(self._notice))
            plain += f"\ngpupool: {self._notice}"
        return {"text/html": markup.card(*blocks), "text/plain": plain}

    def _show_report(self, *, always: bool) -> None:
        assert self._report is not None
        text = picture.report_text(self._report, self._look)
        if text or always:
            html = picture.report_html(self._report, self._look)
            self._show({"text/html": html, "text/plain": text or picture.heading(self._report)})

    def _show(self, data: dict[str, str]) -> None:
        self._drawn_chars = sum(map(len, data.values()))
        self._place.show(data)

    def _show_others(self, report: CellReport) -> None:
        """Show what cannot stand in our HTML, each in a place of its own, below its ranks."""
        others = {
            rank: [
                bundle
                for bundle in output.displays
                if is_rich(bundle) and not is_embeddable(bundle)
                if self._look.show_values or bundle["kind"] == OutputKind.DISPLAY
            ]
            for rank, output in report.outputs.items()
        }
        for ranks, bundle in fold_displays(others):
            Place(self._place).show({"text/plain": f"[{format_ranks(ranks)}]"})
            Place(self._place).show(bundle["data"], dict(bundle.get("metadata") or {}))

    def _draw_late(self) -> None:
        """Draw what came after the end: soon, and not too often."""
        with self._lock:
            self._timer = None
            self._show_report(always=True)


def notice_html(text: str) -> str:
    """A notice as an amber bar; one about ranks as a table of them, with an Interrupt button."""
    if not isinstance(text, Diagnosis) or not text.places:
        return markup.bar(markup.code(text), markup.AMBER)
    rows = [
        (f"{format_ranks(ranks)}{f' ({host})' * bool(host)}", doing or "running", line)
        for ranks, doing, line, host in text.places
    ]
    table = markup.table(("ranks", "where", "line"), rows)
    parts = [f"<b>{escape(text.head)}</b>", table, escape(text.advice), interrupt_button()]
    return markup.bar("".join(f"<div>{part}</div>" for part in parts if part), markup.AMBER)


class LineView:
    """Lines as they come, with their ranks; one that several say at about the same time once."""

    def __init__(self, ranks: Sequence[int] = (), show_values: bool = True) -> None:
        self._shown = {OutputKind.DISPLAY, *[OutputKind.RESULT] * show_values}
        self._lines = Lines(ranks)
        self._loops = LoopViews()
        self._lock = threading.Lock()  # output comes in another thread than that which waits
        self._is_over = False
        self._now = time.monotonic()  # of the last tick: what comes between two is in order of rank
        self.notice = NoticeLines()

    def on_output(self, rank: int, kind: OutputKind, content: Any) -> None:
        """Keep the lines; they are written by the waiting thread, whose cell it is."""
        if kind is OutputKind.EVENTS:
            self._loops.take(content)
            return
        with self._lock:
            if kind in STREAMS:
                self._lines.feed(rank, content, self._now)
            elif kind in self._shown:
                self._lines.end(rank, self._now, str(content["data"].get("text/plain", "")))
        if self._is_over:  # nobody waits any more
            self._write(is_over=True)

    def tick(self, states: States = dict) -> None:
        self._write(is_over=False)
        self._loops.tick()

    def finish(self, report: CellReport) -> None:
        with self._lock:
            for rank in report.outputs:
                self._lines.end(rank, self._now)
        self._write(is_over=True)
        self._loops.finish()
        mark_shown(report.result, values=OutputKind.RESULT in self._shown)

    def _write(self, *, is_over: bool) -> None:
        with self._lock:
            self._is_over, self._now = is_over, time.monotonic()
            lines = self._lines.due(self._now, at_end=is_over)
        seen = str if shows_colours(sys.stdout) else ansi.plain
        if lines:
            labelled = (f"[{format_ranks(ranks)}] {seen(line)}" for ranks, line in lines)
            write_line("\n".join(labelled), sys.stdout)


class QuietView(LineView):
    """Shows nothing but notices: who wants no output wants to hear of a cell that hangs."""

    def on_output(self, rank: int, kind: OutputKind, content: Any) -> None:
        pass

    def finish(self, report: CellReport) -> None:
        mark_shown(report.result)


# ---- the loops of a cell -------------------------------------------------------------------------


class LoopViews:
    """Shows the monitors of a cell: each as the monitor of `train()`, in a terminal as lines.

    Events may come in any thread; what is shown is shown in `tick` and `finish`. `stop_wish` is set
    when Stop is pressed; without it there is no button.
    """

    def __init__(
        self, *, beside: Place | None = None, stop_wish: threading.Event | None = None
    ) -> None:
        self._beside, self._stop_wish = beside, stop_wish
        self._is_over = False  # nobody calls `tick` any more: what still comes is shown at once
        # A queue: `take` must not wait for a picture, or the ranks' output would wait as well.
        self._new: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._bars: dict[str, Progress] = {}
        self._shown: dict[int, tuple[LoopHistory, LiveMonitor]] = {}
        self._lines: dict[int, MonitorLines] = {}

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            self._new.put(event)
        if self._is_over:
            self.tick()

    def tick(self) -> None:
        with self._lock:
            while not self._new.empty():
                event = self._new.get()
                if isinstance(event, MonitorEvent):
                    self._show(event)
                elif isinstance(event, ProgressEvent) and not self._is_over:
                    self._draw_bar(event)

    def finish(self) -> None:
        """The cell is over: leave the last picture of each, and show at once what still comes."""
        self._is_over = True
        with self._lock:
            self.tick()
            for bar in self._bars.values():  # that were not ended
                bar.close()
            for history, view in self._shown.values():
                history.end()
                view(history)
            self._stop_wish = None  # nobody is there to heed it

    def _draw_bar(self, event: ProgressEvent) -> None:
        """One bar for each thing that a rank reports, which it does when that has lasted."""
        if event.what not in self._bars:
            # The rank has waited its second already: the bar is drawn at once.
            self._bars[event.what] = Progress(event.what, unit=event.unit, elapsed_s=AFTER_S)
            self._bars[event.what].start()
        bar = self._bars[event.what]
        bar.update(event.done, event.total or None)
        if event.done == event.total:
            self._bars.pop(event.what).close()

    def _show(self, event: MonitorEvent) -> None:
        if not in_notebook() or not has_reader():
            stream = sys.stdout if in_notebook() else sys.stderr
            self._lines.setdefault(event.number, MonitorLines(stream))(event)
        if not in_notebook():
            return
        # imported here: a cell without a monitor is quicker
        from gpupool.notebook.monitor.curves import LoopHistory
        from gpupool.notebook.monitor.live import LiveMonitor

        if event.number in self._shown:
            history, view = self._shown[event.number]
            history.add(event)
            view(history)
        else:
            history = LoopHistory(event, hears_stop=self._stop_wish is not None)
            history.add(event)
            wish = self._stop_wish or threading.Event()
            view = LiveMonitor(wish.set, history, Place(self._beside))
            self._shown[event.number] = history, view


# ---- what the running cell has shown -------------------------------------------------------------


def mark_shown(result: SpmdResult | None, *, values: bool = True) -> None:
    """The running cell has shown this result, or of it only what the ranks have printed."""
    if result is not None:
        result.shown = (_this_cell(), "everything" if values else "texts")


def part_shown(result: SpmdResult) -> str:
    """What the cell that runs has shown of this result: "nothing", "texts" or "everything"."""
    cell, part = result.shown
    return part if cell == _this_cell() else "nothing"


def mark_error_shown(error: SpmdError) -> None:
    """The running cell has shown the tracebacks of this error: raised in it, it need not again."""
    shell: Any = get_ipython()

    # After the cell: asked for again in another one, the error shows its tracebacks once more.
    def forget(_: object) -> None:
        error.is_shown = False
        shell.events.unregister("post_run_cell", forget)

    error.is_shown = True
    shell.events.register("post_run_cell", forget)


def register_formatters(shell: Any) -> None:
    """Let IPython show a result by what its ranks said, unless its cell has just done so."""

    def show_once(result: SpmdResult) -> None:
        if part_shown(result) != "everything" or getattr(shell, "kernel", None) is None:
            raise NotImplementedError  # to IPython: it is to be shown like other objects

    def text(result: SpmdResult, p: Any, cycle: bool) -> None:
        is_inside = len(p.stack) > 1  # of a list, say
        texts = part_shown(result) == "nothing"
        p.text(repr(result) if is_inside else picture.result_text(result, texts=texts))

    def html(result: SpmdResult) -> str:
        return picture.result_html(result, texts=part_shown(result) == "nothing")

    formatters = shell.display_formatter.formatters
    formatters["text/plain"].for_type(SpmdResult, text)
    formatters["text/html"].for_type(SpmdResult, html)
    shell.display_formatter.ipython_display_formatter.for_type(SpmdResult, show_once)


def _this_cell() -> int:
    shell: Any = get_ipython()
    return int(shell.displayhook.prompt_count) if shell is not None else 0
