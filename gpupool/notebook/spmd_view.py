"""What the ranks of a %%spmd cell say, live and at the end. Runs on the client."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display

from gpupool.notebook import markup
from gpupool.notebook.words import duration
from gpupool.pool.result import RankOutput, SpmdResult
from gpupool.spmd.cell import CellReport, View
from gpupool.spmd.output import Group, fold, format_ranks, tail

REDRAW_EVERY_S = 0.25
NUM_TAIL_LINES = 20
MAX_LINE_CHARS = 2000
HEAD_LINES, LAST_LINES = 200, 50  # of a group at the end; the rest is in result.text(rank)


def make_view(name: str) -> View:
    """The view for `--view`: in a notebook a live tail and groups at the end, else lines."""
    shell = get_ipython()
    if name == "quiet":
        return QuietView()
    if name == "raw" or getattr(shell, "kernel", None) is None:
        return LineView()
    return LiveView(fold_equal=name == "auto")


class QuietView:
    """Shows nothing."""

    def on_output(self, rank: int, kind: str, content: Any) -> None:
        """Nothing."""

    def tick(self) -> None:
        """Nothing."""

    def finish(self, report: CellReport) -> None:
        """Nothing."""


class LineView:
    """Every line as it comes, with its rank: for terminals, logs and `--view raw`."""

    def __init__(self) -> None:
        self._lines = _Lines()
        self._queue: deque[tuple[int, str]] = deque()

    def on_output(self, rank: int, kind: str, content: Any) -> None:
        """Queue the complete lines; they are written by the waiting thread, whose cell it is."""
        if kind in ("stdout", "stderr"):
            self._queue.extend(self._lines.feed(rank, content))
        elif kind == "result":
            self._queue.append((rank, content["data"].get("text/plain", "")))

    def tick(self) -> None:
        """Write what has come."""
        while self._queue:
            rank, line = self._queue.popleft()
            sys.stdout.write(f"[{rank}] {line}\n")
        sys.stdout.flush()

    def finish(self, report: CellReport) -> None:
        """Write the rest, also lines without an end."""
        self._queue.extend(self._lines.rest())
        self.tick()


class LiveView:
    """A bounded tail that is drawn anew while the cell runs, then the ranks' output in groups."""

    def __init__(self, fold_equal: bool) -> None:
        self._fold_equal = fold_equal
        self._lines = _Lines()
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
        texts = {rank: _shown_text(output) for rank, output in report.outputs.items()}
        if any(texts.values()) or self._handle is not None:
            groups = fold(texts) if self._fold_equal else [Group((r,), t) for r, t in texts.items()]
            self._show(
                {
                    "text/html": groups_html(groups, report),
                    "text/plain": groups_text(groups),
                }
            )
        for rank, output in report.outputs.items():
            for bundle in output.displays:
                if bundle["kind"] == "display" or _is_rich(bundle):
                    display({"text/plain": f"[{rank}]"}, raw=True)
                    display(bundle["data"], metadata=bundle.get("metadata", {}), raw=True)

    def _show(self, bundle: dict[str, str]) -> None:
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def groups_text(groups: list[Group]) -> str:
    """The groups as text: the ranks in front, the lines below each other.

    >>> print(groups_text([Group((0, 1), "device cpu\\nrows 3"), Group((2,), "rows 2")]))
    [0, 1] device cpu
           rows 3
    [2] rows 2
    """
    blocks = []
    for group in groups:
        if group.text:
            mark = f"[{format_ranks(group.ranks)}] "
            blocks.append(mark + _cut(group.text).replace("\n", "\n" + " " * len(mark)))
    return "\n".join(blocks)


def groups_html(groups: list[Group], report: CellReport) -> str:
    """The groups under a line on how the cell went; equal ranks once."""
    num_ranks = len(report.outputs)
    failed = len(report.error.errors) if report.error else 0
    head = f"<b>{num_ranks} rank{'s' if num_ranks > 1 else ''}</b>"
    if num_ranks > failed:
        head += markup.badge(f"✓ {num_ranks - failed} ok", markup.GREEN)
    if failed:
        head += markup.badge(f"✗ {failed} failed", markup.RED)
    head += markup.muted(_times(report))
    blocks = []
    for number, group in enumerate(groups):
        if group.text:
            title = f"<b>[{format_ranks(group.ranks)}]</b> "
            if len(group.ranks) > 1:
                title += markup.muted(f"identical on {len(group.ranks)} ranks")
            inner = (
                f"<details open><summary>{title}</summary>{markup.code(_cut(group.text))}</details>"
            )
            blocks.append(markup.bar(inner, markup.AMBER if number else markup.GREEN))
    return markup.card(head, *blocks)


def result_text(result: SpmdResult) -> str:
    """The values per rank, equal ones once."""
    return groups_text(fold({rank: result.value_text(rank) or "None" for rank in result.ranks}))


def register_formatters(shell: Any) -> None:
    """Let IPython show a result by its values."""
    formatter = shell.display_formatter.formatters["text/plain"]
    formatter.for_type(SpmdResult, lambda result, p, cycle: p.text(result_text(result)))


class _Lines:
    """Cuts each rank's stream into lines; the unfinished last one waits for its end."""

    def __init__(self) -> None:
        self._open: dict[int, str] = {}

    def feed(self, rank: int, text: str) -> list[tuple[int, str]]:
        """The lines that this piece completes; of a redrawn progress bar the last state."""
        *lines, rest = (self._open.get(rank, "") + text.replace("\r\n", "\n")).split("\n")
        self._open[rank] = (
            rest.rpartition("\r")[2][-MAX_LINE_CHARS:] if rest[:-1].count("\r") else rest
        )
        return [(rank, line.rstrip("\r").rpartition("\r")[2][:MAX_LINE_CHARS]) for line in lines]

    def partial(self) -> list[tuple[int, str]]:
        """The unfinished lines as they look now."""
        return [
            (rank, line.rstrip("\r").rpartition("\r")[2][:MAX_LINE_CHARS])
            for rank, line in sorted(self._open.items())
            if line
        ]

    def rest(self) -> list[tuple[int, str]]:
        """The unfinished lines, for good."""
        lines, self._open = self.partial(), {}
        return lines


def _shown_text(output: RankOutput) -> str:
    """What the rank printed, and after it the value of its last expression."""
    values = [
        bundle["data"].get("text/plain", "")
        for bundle in output.displays
        if bundle["kind"] == "result" and not _is_rich(bundle)
    ]
    return "\n".join([*([output.text.rstrip("\n")] if output.text.strip() else []), *values])


def _is_rich(bundle: dict[str, Any]) -> bool:
    return bool(set(bundle["data"]) - {"text/plain"})


def _times(report: CellReport) -> str:
    result = report.result
    if result is None or len(result) < 2:
        return duration(report.elapsed_s)
    by_rank = {rank: result.rank_elapsed_s(rank) for rank in result.ranks}
    slowest, fastest = max(by_rank, key=by_rank.__getitem__), min(by_rank.values())
    if by_rank[slowest] - fastest < 0.1:
        return duration(report.elapsed_s)
    return (
        f"{duration(report.elapsed_s)} (slowest rank {slowest}: {duration(by_rank[slowest])}, "
        f"fastest {duration(fastest)})"
    )


def _cut(text: str) -> str:
    lines = text.split("\n")
    left_out = len(lines) - HEAD_LINES - LAST_LINES
    if left_out <= 0:
        return text
    note = f"[... {left_out} lines left out; -o NAME keeps all, NAME.text(rank) ...]"
    return "\n".join([*lines[:HEAD_LINES], note, *lines[-LAST_LINES:]])
