"""A pool that starts, its environment and its hosts as text and HTML. Runs on the client."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING

from gpupool.core.formatting import NONE, rank_count, text_table
from gpupool.core.progress import Progress
from gpupool.notebook.page import markup
from gpupool.notebook.page.cell_output import Place
from gpupool.notebook.page.front_end import in_notebook, log_line
from gpupool.notebook.pool import pool_bar
from gpupool.notebook.pool.bar import countdown
from gpupool.pool import session
from gpupool.pool.notices import NoticeLines
from gpupool.pool.status import HostInfo, PoolStatus

if TYPE_CHECKING:
    from gpupool.pool.pool import Pool

_NAMES_ON_A_LINE = 4
_HOST_COLUMNS = ("host", "state", "ranks", "GPUs", "address", "NCCL")


def env_text(
    variables: Mapping[str, str], world_size: int, unset: bool = False, credentials: str = ""
) -> str:
    """Names and fingerprints of variables, how AWS credentials stand; values are not known here."""
    if not variables:
        return "No variable matches." if unset else "No variable has been propagated."
    if unset:
        return f"Removed from {rank_count(world_size)}: {', '.join(variables)}"
    names = [f"{name} ({mark})" for name, mark in variables.items()]
    listed = "\n  ".join(["", *names]) if len(names) > _NAMES_ON_A_LINE else f" {', '.join(names)}"
    return f"On {rank_count(world_size)}:{listed}\n{credentials}".rstrip()


def hosts_shown(hosts: Sequence[HostInfo]) -> dict[str, str]:
    """A line for each host, below the names of the columns: as text, and as HTML that scrolls."""
    rows = [[cell or NONE for cell in astuple(host)] for host in hosts]
    text = text_table([_HOST_COLUMNS, *rows])
    table = markup.scroller(markup.table(_HOST_COLUMNS, rows), "Hosts")
    return {"text/plain": text, "text/html": markup.card(table)}


class StartProgress:
    """A line that says how far the start is, and since when; the pool's bar takes its place."""

    def __init__(self, what: str = "Starting the pool") -> None:
        self._place = Place() if in_notebook() else None
        self._line = Progress(what)
        if self._place is not None:
            from gpupool.notebook.page.progress_view import NotebookBar  # with tqdm

            self._line = Progress(what, after_s=0, draw=NotebookBar(self._place))

    def __enter__(self) -> StartProgress:
        if self._place is None:
            self._line.start()
        return self

    def __call__(self, line: str) -> None:
        """Show a stage."""
        self._line.tell(line)
        # Not before: a start that is refused at once has no line.
        if self._place is not None and not self._place.is_shown:
            self._line.tick()
            self._line.start()
            # while the processes come up, not when they are there
            importlib.import_module("gpupool.notebook.page.live_html")

    def finish(self, text: str, pool: Pool | None = None) -> None:
        """Show a text instead, or a pool; of that from now on also what becomes of it."""
        self._line.close()
        if self._place is None:
            print(text)
            if pool is not None:
                pool.add_listener(_tell_on_terminal)
            return
        log_line(text.partition("\n")[0])
        if pool is not None:
            pool_bar.show(pool, self._place)
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
