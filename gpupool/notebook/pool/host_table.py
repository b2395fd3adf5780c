"""The hosts of a pool as text and HTML. Pure functions; runs on the client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

from gpupool.core.formatting import NONE, text_table
from gpupool.notebook.page import markup
from gpupool.pool.status import HostInfo

_COLUMNS = ("host", "state", "ranks", "GPUs", "address", "NCCL")


def hosts_shown(hosts: Sequence[HostInfo]) -> dict[str, str]:
    """A line for each host, below the names of the columns: as text, and as HTML that scrolls."""
    rows = [[cell or NONE for cell in astuple(host)] for host in hosts]
    text = text_table([_COLUMNS, *rows])
    table = markup.scroller(markup.table(_COLUMNS, rows), "Hosts")
    return {"text/plain": text, "text/html": markup.card(table)}
