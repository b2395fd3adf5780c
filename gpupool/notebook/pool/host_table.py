"""The hosts of a pool as text and HTML. Pure functions; runs on the client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gpupool.core.formatting import NONE, format_ranks
from gpupool.notebook.page import markup
from gpupool.pool.status import HostInfo


def hosts_shown(hosts: Sequence[HostInfo]) -> dict[str, str]:
    """A line for each host, below the names of the columns: as text, and as HTML that scrolls."""
    columns, *lines = rows = _rows(hosts)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (map(str.ljust, row, widths) for row in rows)
    table = markup.scroller(markup.table(columns, lines), "Hosts")
    text = "\n".join("  ".join(row).rstrip() for row in padded)
    return {"text/plain": text, "text/html": markup.card(table)}


def _rows(hosts: Sequence[HostInfo]) -> list[list[str]]:
    rows = [["host", "state", "ranks", "GPUs", "address", "round trip", "versions", "NCCL"]]
    for host in hosts:
        gpus = (f"{number} × {name}" for name, number in Counter(host.gpus).items())
        cells = [
            *(host.name, host.state, format_ranks(host.ranks), ", ".join(gpus)),
            f"{host.address} ({host.interface})",
            "" if host.ping_ms is None else f"{host.ping_ms:.2g} ms",
            ", ".join(map(" ".join, host.versions.items())),
            host.nccl,
        ]
        rows.append([cell or NONE for cell in cells])
    # the column of NCCL is left out where it is not used
    return rows if any(host.nccl for host in hosts) else [row[:-1] for row in rows]
