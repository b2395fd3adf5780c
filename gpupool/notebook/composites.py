"""A Composite as text and HTML: what each rank has, equal values once. Runs on the client."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from gpupool.core.errors import PoolError
from gpupool.core.formatting import format_ranks
from gpupool.core.wire.values import ValueInfo
from gpupool.notebook.page import markup
from gpupool.pool.variables.composite import Composite, key_of, pool_variables
from gpupool.spmd.output import fold

TEXT_CHARS = 200  # of a rank's value


def composite_text(composite: Composite) -> str:
    """The handle, and below it a line per kind of value.

    For example

        lr on 2 ranks
        [0, 1] float  0.1
    """
    head, rows = _rows(composite)
    lines = [head]
    for ranks, kind, value in rows:
        mark = f"[{ranks}] {kind}  "
        lines.append((mark + value.replace("\n", "\n" + " " * len(mark))).rstrip())
    return "\n".join(lines)


def composite_html(composite: Composite) -> str:
    """The same as a table."""
    head, rows = _rows(composite)
    table = markup.table(("rank", "type", "value"), rows)
    return markup.card(f"<b>{escape(head)}</b>", table if rows else "")


def _rows(composite: Composite) -> tuple[str, list[tuple[str, str, str]]]:
    """The line above, and (ranks, kind, short value) of each group of equal ones."""
    head = f"{composite} on {len(composite)} rank{'s' if len(composite) > 1 else ''}"
    infos: Mapping[int, ValueInfo]
    try:
        infos = pool_variables(composite).look(composite, TEXT_CHARS)
    except PoolError as error:
        return f"{head}: {error}", []
    missing = [rank for rank in range(len(composite)) if rank not in infos]
    # Type and text as one string, as `fold` takes it; no name of a type has a NUL.
    lines = {rank: f"{info}\0{info.text or ''}" for rank, info in infos.items()}
    rows = []
    for group in sorted(fold(lines), key=lambda group: group.ranks):
        kind, _, text = group.text.partition("\0")
        rows.append((format_ranks(group.ranks), kind, text))
    lost = pool_variables(composite).losses.of(key_of(composite)[0])
    rows += [
        (str(rank), "no value", f"lost with rank {rank}, which {lost[rank]}")
        for rank in missing
        if rank in lost
    ]
    never = [rank for rank in missing if rank not in lost]
    if never:
        rows.append((format_ranks(never), "no value", ""))
    return head, rows
