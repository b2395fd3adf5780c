"""The hosts of a pool as text and HTML. Pure functions; runs on the client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gpupool.core.formatting import NONE, format_ranks
from gpupool.notebook.page import markup
from gpupool.pool.status import HostInfo

_COLUMNS = ("host", "state", "ranks", "GPUs", "address", "round trip", "versions", "NCCL")


def hosts_text(hosts: Sequence[HostInfo]) -> str:
    """A line for each host, below the names of the columns."""
    lines = _lines(hosts)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def hosts_html(hosts: Sequence[HostInfo]) -> str:
    """The same as a table, which scrolls sideways where it is too wide."""
    columns, *rows = _lines(hosts)
    return markup.card(markup.scroller(markup.table(columns, rows), "Hosts"))


def _lines(hosts: Sequence[HostInfo]) -> list[tuple[str, ...]]:
    """The names of the columns, then the cells of each host; NCCL's only where it is used."""
    lines = [_COLUMNS, *map(_cells, hosts)]
    return lines if any(host.nccl for host in hosts) else [line[:-1] for line in lines]


def _cells(host: HostInfo) -> tuple[str, ...]:
    gpus = (f"{number} × {name}" for name, number in Counter(host.gpus).items())
    interface = f" ({host.interface})" if host.interface else ""
    return (
        host.name,
        host.state,
        format_ranks(host.ranks) or NONE,
        ", ".join(gpus) or NONE,
        f"{host.address}{interface}" or NONE,
        NONE if host.ping_ms is None else f"{host.ping_ms:.2g} ms",
        ", ".join(f"{name} {version}" for name, version in host.versions.items()) or NONE,
        host.nccl or NONE,
    )
