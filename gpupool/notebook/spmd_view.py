"""What the ranks of a %%spmd cell say, live and at the end. Runs on the client."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from IPython.display import display

from gpupool.notebook import markup
from gpupool.notebook.place import in_notebook
from gpupool.notebook.spmd_picture import groups_html, groups_text, result_text
from gpupool.pool.result import RankOutput, SpmdResult
from gpupool.spmd.cell import CellReport, View
from gpupool.spmd.output import Group, fold, fold_displays, format_ranks, tail

REDRAW_EVERY_S = 0.25
NUM_TAIL_LINES = 20
MAX_LINE_CHARS = 2000  # of the live tail
MAX_QUEUED_LINES = 200_000  # that nobody has waited for yet


def make_view(name: str, show_values: bool = True, *, inline: bool = False) -> View:
    """The view for `--view`: in a notebook a live tail and groups at the end, else lines.

    Args:
        show_values: whether the value of the last expression belongs to the output.
        inline: the pool is inline: what the cell prints and displays is seen already.
    """
    if inline:
        return QuietView() if name == "quiet" or not show_values else ValueView()
    draws = in_notebook()
    if name == "quiet":
        return QuietView()
    if name == "raw" or not draws:
        return LineView(show_values, show_figure if draws else None)
    return LiveView(show_values, fold_equal=name == "auto")


def show_figure(ranks: Sequence[int], bundle: Mapping[str, Any]) -> None:
    """Display what ranks have displayed, their names above it."""
    name = f"[{format_ranks(ranks)}]"
    html = f'<div style="{markup.FONT}"><b>{name}</b></div>'
    display({"text/html": html, "text/plain": name}, raw=True)
    display(bundle["data"], metadata=bundle.get("metadata", {}), raw=True)


class QuietView:
    """Shows nothing."""

    def on_output(self, rank: int, kind: str, content: Any) -> None:
        """Nothing."""

    def tick(self) -> None:
        """Nothing."""

    def finish(self, report: CellReport) -> None:
        """Nothing."""


class ValueView:
    """Shows the value of a cell that an inline pool has run; the rest has been seen already."""

    def on_output(self, rank: int, kind: str, content: Any) -> None:
        """Nothing: it is on the screen."""

    def tick(self) -> None:
        """Nothing."""

    def finish(self, report: CellReport) -> None:
        """Show the value as the notebook shows one."""
        for output in report.outputs.values():
            for bundle in output.displays:
                if bundle["kind"] == "result":
                    display(bundle["data"], metadata=bundle.get("metadata", {}), raw=True)


class LineView:
    """Every line as it comes, with its rank: for terminals, logs and `--view raw`.

    Figures are drawn by `show_figure`; without one their text is shown.
    """

    def __init__(
        self,
        show_values: bool = True,
        show_figure: Callable[[Sequence[int], Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._show_values = show_values
        self._show_figure = show_figure
        self._lines = _Lines()
        self._queue: deque[tuple[int, str | dict[str, Any]]] = deque(maxlen=MAX_QUEUED_LINES)

    def on_output(self, rank: int, kind: str, content: Any) -> None:
        """Queue the complete lines; they are written by the waiting thread, whose cell it is."""
        if kind in ("stdout", "stderr"):
            self._queue.extend(self._lines.feed(rank, content))
            return
        rich = _is_rich(content)
        if kind == "display" or rich or self._show_values:
            self._queue.extend(self._lines.rest(rank))
            if rich and self._show_figure is not None:
                self._queue.append((rank, content))
            else:
                self._queue.extend((rank, line) for line in _plain_text(content).split("\n"))

    def tick(self) -> None:
        """Write what has come."""
        while self._queue:
            rank, piece = self._queue.popleft()
            if isinstance(piece, str):
                sys.stdout.write(f"[{rank}] {piece}\n")
            elif self._show_figure is not None:
                sys.stdout.flush()
                self._show_figure((rank,), piece)
        sys.stdout.flush()

    def finish(self, report: CellReport) -> None:
        """Write the rest, also lines without an end."""
        for rank in report.outputs:
            self._queue.extend(self._lines.rest(rank))
        self.tick()


class LiveView:
    """A bounded tail that is drawn anew while the cell runs, then the ranks' output in groups."""

    def __init__(self, show_values: bool = True, *, fold_equal: bool) -> None:
        self._show_values = show_values
        self._fold_equal = fold_equal
        self._lines = _Lines(MAX_LINE_CHARS)
        self._tail: deque[tuple[int, str]] = deque(maxlen=NUM_TAIL_LINES * 32)
        self._lock = threading.Lock()
        self._handle: Any = None
        self._drawn_at = time.monotonic()
        self._dirty = False

    def on_output(self, rank: int, kind: str, content: Any) -> None:
        """Keep the end of the text; drawing is left to `tick`, so that floods cost nothing."""
        if kind in ("stdout", "stderr"):
            with self._lock:
                self._tail.extend(self._lines.feed(rank, content))
                self._dirty = True

    def tick(self) -> None:
        """Draw, if there is news and it is time."""
        now = time.monotonic()
        if not self._dirty or now - self._drawn_at < REDRAW_EVERY_S:
            return
        with self._lock:
            lines = tail([*self._tail, *self._lines.partial()], NUM_TAIL_LINES)
            self._dirty = False
        self._drawn_at = now
        self._show({"text/plain": "\n".join(f"[{format_ranks(r)}] {line}" for r, line in lines)})

    def finish(self, report: CellReport) -> None:
        """Put the groups in the place of the tail, and show figures below."""
        outputs = report.outputs
        texts = {r: _shown_text(output, self._show_values) for r, output in outputs.items()}
        if any(texts.values()) or self._handle is not None:
            groups = fold(texts) if self._fold_equal else [Group((r,), t) for r, t in texts.items()]
            self._show(
                {
                    "text/html": groups_html(groups, report),
                    "text/plain": groups_text(groups),
                }
            )
        figures = {
            rank: [bundle for bundle in output.displays if _is_rich(bundle)]
            for rank, output in outputs.items()
        }
        if self._fold_equal:
            for ranks, bundle in fold_displays(figures):
                show_figure(ranks, bundle)
        else:
            for rank, bundles in figures.items():
                for bundle in bundles:
                    show_figure((rank,), bundle)

    def _show(self, bundle: dict[str, str]) -> None:
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def register_formatters(shell: Any) -> None:
    """Let IPython show a result by its values."""
    formatter = shell.display_formatter.formatters["text/plain"]
    formatter.for_type(SpmdResult, lambda result, p, cycle: p.text(result_text(result)))


class _Lines:
    """Cuts each rank's stream into lines; the unfinished last one waits for its end."""

    def __init__(self, max_chars: int | None = None) -> None:
        self._max_chars = max_chars
        self._open: dict[int, str] = {}

    def feed(self, rank: int, text: str) -> list[tuple[int, str]]:
        """The lines that this piece completes; of a redrawn progress bar the last state."""
        *lines, rest = (self._open.get(rank, "") + text.replace("\r\n", "\n")).split("\n")
        # A last "\r" is kept: what comes next is drawn over the line, or is a "\n".
        self._open[rank] = self._as_drawn(rest) + ("\r" if rest.endswith("\r") else "")
        return [(rank, self._as_drawn(line)) for line in lines]

    def partial(self) -> list[tuple[int, str]]:
        """The unfinished lines as they look now."""
        return [(rank, self._as_drawn(line)) for rank, line in sorted(self._open.items()) if line]

    def rest(self, rank: int) -> list[tuple[int, str]]:
        """The unfinished line of a rank, for good."""
        line = self._open.pop(rank, "")
        return [(rank, self._as_drawn(line))] if line else []

    def _as_drawn(self, line: str) -> str:
        return line.rstrip("\r").rpartition("\r")[2][: self._max_chars]


def _shown_text(output: RankOutput, show_values: bool) -> str:
    """What the rank printed, and after it what it displayed as mere text."""
    texts = [
        _plain_text(bundle)
        for bundle in output.displays
        if not _is_rich(bundle) and (show_values or bundle["kind"] == "display")
    ]
    return "\n".join([*([output.text.rstrip("\n")] if output.text.strip() else []), *texts])


def _plain_text(bundle: Mapping[str, Any]) -> str:
    return str(bundle["data"].get("text/plain", ""))


def _is_rich(bundle: Mapping[str, Any]) -> bool:
    return bool(set(bundle["data"]) - {"text/plain"})
