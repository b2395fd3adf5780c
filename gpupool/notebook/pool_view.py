"""The pool, its environment and the GPUs as text and HTML. Runs on the client."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from IPython.display import display

from gpupool.core.gpu_table import GpuTable
from gpupool.core.topology import Rank
from gpupool.notebook import markup
from gpupool.notebook.front_end import in_notebook
from gpupool.notebook.words import duration
from gpupool.pool.pool import Pool
from gpupool.pool.status import PoolStatus

_COLOURS = {
    "idle": markup.GREEN,
    "busy": markup.AMBER,
    "replacing": markup.AMBER,
    "broken": markup.RED,
    "stopped": markup.GREY,
}


NO_PROCESS = "–"  # in the column of process ids: the rank's has ended


def status_text(status: PoolStatus) -> str:
    """One line on the pool and one for each rank."""
    lines = [f"Pool of {len(status.ranks)}: {status.state}, " + ", ".join(_facts(status))]
    if status.reason:
        lines.append(status.reason)
    for rank, device, threads, pid in rank_rows(status):
        plural = "" if threads == "1" else "s"
        process = "no process" if pid == NO_PROCESS else f"pid {pid}"
        lines.append(f"  rank {rank}  {device}  {threads} thread{plural}  {process}")
    return "\n".join(lines)


def status_html(status: PoolStatus) -> str:
    """The pool's bar; the ranks unfold."""
    head = (
        f"<b>Pool of {len(status.ranks)}</b>"
        + markup.badge(status.state, _COLOURS[status.state])
        + markup.muted(" · ".join(_facts(status)))
    )
    reason = markup.bar(markup.code(status.reason), _COLOURS[status.state]) if status.reason else ""
    if status.stops_soon:
        reason = markup.bar(markup.code(f"The pool {_countdown(status)}."), markup.AMBER)
    ranks = markup.table(("rank", "device", "threads", "pid"), rank_rows(status))
    return markup.card(head, reason, f"<details><summary>Ranks</summary>{ranks}</details>")


def rank_rows(status: PoolStatus) -> list[tuple[str, str, str, str]]:
    """(rank, device, threads, pid) of each rank."""
    return [
        (
            str(rank.rank),
            _device(rank, status),
            str(rank.num_threads),
            str(status.pids.get(rank.rank, NO_PROCESS)),
        )
        for rank in status.ranks
    ]


def waits_text(status: PoolStatus) -> str:
    """What a cell says that is asked for while ranks are being replaced."""
    lost = [rank.rank for rank in status.ranks if rank.rank not in status.pids]
    if not lost:  # the new ones are there already, and join the group
        return "gpupool: waits until the lost ranks are replaced."
    are = "is" if len(lost) == 1 else "are"
    after = ", ".join(status.replaced_after)
    when = f", which begins when {after} has ended" if after else ""
    return f"gpupool: waits until rank {', '.join(map(str, lost))} {are} replaced{when}."


def env_text(
    variables: Mapping[str, str], world_size: int, unset: bool = False, credentials: str = ""
) -> str:
    """Names and fingerprints of variables, how AWS credentials stand; values are not known here."""
    if not variables:
        return "No variable matches." if unset else "No variable has been propagated."
    if unset:
        return f"Removed from {world_size} ranks: {', '.join(variables)}"
    names = ", ".join(f"{name} ({mark})" for name, mark in variables.items())
    return f"On {world_size} ranks: {names}" + (f"\n{credentials}" if credentials else "")


def gpu_table_html(table: GpuTable) -> str:
    """The GPU table, or a sentence where there is none."""
    if not table:
        return markup.card(markup.muted(table.none))
    return markup.card(markup.table(table.HEADER, table.rows()))


class StartProgress:
    """A line that says how far the start is; the pool's bar takes its place.

    In a notebook and on a terminal it is drawn anew in one place; elsewhere only the end shows.
    """

    def __init__(self) -> None:
        self._in_notebook = in_notebook()
        self._handle: Any = None

    def __enter__(self) -> StartProgress:
        return self

    def __call__(self, line: str) -> None:
        """Show a stage."""
        if self._in_notebook:
            self._show(_plain(f"Starting: {line}"))
        elif sys.stderr.isatty():
            sys.stderr.write(f"\rStarting: {line}".ljust(60))
            sys.stderr.flush()

    def finish(self, pool: Pool) -> None:
        """Show the pool; from now on also what becomes of it."""
        status = pool.status()
        if self._in_notebook:
            self._show(_bundle(status))
            pool.add_listener(lambda status: self._show(_bundle(status)))
        else:
            self._clear_line()
            print(status_text(status))
            pool.add_listener(_tell_on_terminal)

    def finish_line(self, text: str) -> None:
        """Show one line instead."""
        if self._in_notebook:
            self._show(_plain(text))
        else:
            self._clear_line()
            print(text)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        if error is None:
            return
        if self._handle is not None:
            self._show(_plain("The pool was not started."))
        elif not self._in_notebook:
            self._clear_line()

    def _show(self, bundle: dict[str, str]) -> None:
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def _clear_line(self) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\r".ljust(60) + "\r")
            sys.stderr.flush()


def register_formatters(shell: Any) -> None:
    """Let IPython show our objects in text and HTML."""
    formatters = shell.display_formatter.formatters
    formatters["text/plain"].for_type(PoolStatus, lambda s, p, cycle: p.text(status_text(s)))
    formatters["text/html"].for_type(PoolStatus, status_html)
    formatters["text/plain"].for_type(GpuTable, lambda table, p, cycle: p.text(repr(table)))
    formatters["text/html"].for_type(GpuTable, gpu_table_html)


def _facts(status: PoolStatus) -> list[str]:
    facts = [_devices(status), status.backend]
    if status.training_backend != status.backend:
        facts[-1] += f" (training: {status.training_backend})"
    if status.generation > 1:  # the group was formed again after an error
        facts.append(f"generation {status.generation}")
    if status.env:
        facts.append(f"env: {', '.join(status.env)} (hidden)")
    if status.credentials:
        facts.append(status.credentials)
    left = status.idle_left_s
    if left is None and not status.inline:
        facts.append("no idle timeout")
    elif left is not None and status.state in ("idle", "busy"):
        facts.append(_countdown(status))
    return facts


def _bundle(status: PoolStatus) -> dict[str, str]:
    return {"text/plain": status_text(status), "text/html": status_html(status)}


def _tell_on_terminal(status: PoolStatus) -> None:
    """A line about what the user has not asked for, where a bar cannot be drawn anew."""
    if status.stops_soon:
        print(f"gpupool: the pool {_countdown(status)}.", file=sys.stderr)
    elif status.state == "stopped" and status.reason:
        print(f"gpupool: the pool was {status.reason}.", file=sys.stderr)


def _countdown(status: PoolStatus) -> str:
    left = status.idle_left_s or 0.0
    # whole minutes: this stays as it is in the saved notebook
    return f"stops in {f'{round(left / 60)} min' if left >= 90 else duration(left)} unless used"


def _devices(status: PoolStatus) -> str:
    names = sorted({rank.gpu.name for rank in status.ranks if rank.gpu})
    if status.inline:
        return f"inline (this process), {', '.join(names) or 'CPU'}"
    if not names:
        return f"CPU ranks: {status.why_cpu}" if status.why_cpu else "CPU ranks"
    spare = len(status.ranks) - len(status.training_ranks)
    shown = f"one engine per GPU ({', '.join(names)})"
    if spare:
        ranks = "1 rank without takes" if spare == 1 else f"{spare} ranks without take"
        shown += f", {ranks} no part in training"
    return shown


def _device(rank: Rank, status: PoolStatus) -> str:
    if rank.gpu is not None:
        return f"{rank.gpu.label}: {rank.gpu.name}"
    return "CPU" if rank.rank in status.training_ranks else "CPU, takes no part in training"


def _plain(text: str) -> dict[str, str]:
    return {"text/plain": text}
