"""How single objects are shown: GPUs, what a datastore holds, a Composite. Runs on the client.

Objects of a datastore are `Any` here: this folder does not import `gpupool.data`.
"""

from __future__ import annotations

from base64 import b64encode
from html import escape
from typing import Any

from gpupool.core.errors import PoolError
from gpupool.core.formatting import format_ranks
from gpupool.core.machine.gpus import GpuTable, use_of
from gpupool.core.machine.topology import Gpu
from gpupool.notebook.page import markup
from gpupool.notebook.page.markup import Html
from gpupool.pool.variables.composite import Composite, handles_of, key_of
from gpupool.spmd.output import fold

_GPU_COLUMNS = ("GPU", "name", "memory", "utilization", "temp.", "pool", "held by")
_GPU_CELL = ";vertical-align:top;white-space:nowrap"
_TROUGH = (
    "height:6px;min-width:64px;border-radius:3px;margin-top:3px;overflow:hidden;"
    "background:rgba(128,128,128,.25)"
)
_BLUE = "#0072bd"
_FULL, _NEARLY = 0.9, 0.7  # of the memory: from there on red, amber
_TILE = "margin:4px;width:132px;display:inline-block;vertical-align:top;text-align:center"
_PICTURE = "width:128px;height:96px;object-fit:contain"
_NAME = "overflow:hidden;text-overflow:ellipsis;white-space:pre;font-size:12px"
_TEXT_CHARS = 200  # of a rank's value


# ---- the GPUs of this machine --------------------------------------------------------------------


def gpu_table_html(table: GpuTable) -> str:
    if not table:
        return markup.card(markup.muted(table.none))
    rows = [_gpu_cells(gpu, row, table) for gpu, row in zip(table, table.rows(), strict=True)]
    return markup.card(markup.scroller(markup.table(_GPU_COLUMNS, rows, _GPU_CELL), "GPUs"))


def _gpu_cells(gpu: Gpu, row: dict[str, str], table: GpuTable) -> list[str]:
    used, total, load = gpu.used_memory_bytes, gpu.total_memory_bytes, gpu.utilization_percent
    rank, use = table.selected.get(gpu.uuid), use_of(gpu, gpu.uuid in table.selected)
    share = used / total if used is not None and total else None
    # Green stands for what a pool can have, so not for memory of a GPU that others use.
    colour = markup.AMBER if use or (share or 0) >= _NEARLY else markup.GREEN
    colour = markup.RED if (share or 0) >= _FULL else colour
    badges = markup.badge(rank, _BLUE) if rank is not None else ""
    badges += markup.badge(use, markup.AMBER) if use else ""
    free = markup.badge("available", markup.GREEN)
    return [
        row["index"],
        row["name"],
        _meter(share, row["memory"], colour),
        _meter(None if load is None else load / 100, row["utilization"], _BLUE),
        row["temperature"],
        Html(badges or (markup.muted(f"no: {gpu.unavailable}") if gpu.unavailable else free)),
        Html("<br>".join(escape(str(process)) for process in gpu.processes) or "-"),
    ]


def _meter(share: float | None, text: str, colour: str) -> Html:
    if share is None:
        return Html(escape(text))
    bar = f'<div style="height:6px;width:{100 * min(share, 1):.0f}%;background:{colour}"></div>'
    return Html(f'{escape(text)}<div style="{_TROUGH}">{bar}</div>')


# ---- what a datastore holds ----------------------------------------------------------------------


def preview_html(preview: Any) -> str:
    """A grid of pictures, each over its label; all is in the page, so a saved notebook has it."""
    tiles = "".join(map(_tile, preview))
    return markup.card(f"<div>{tiles}</div>", markup.muted(preview.title))


def _tile(picture: Any) -> str:
    label = escape(picture.label)
    if picture.problem:
        shown = f"<div>{escape(picture.problem)}</div>"
        title = picture.url
    else:
        data = b64encode(picture.png).decode()
        shown = f'<img style="{_PICTURE}" alt="{label}" src="data:image/png;base64,{data}">'
        title = f"{picture.url} ({picture.width} x {picture.height})"
    name = f'<figcaption title="{label}" style="{_NAME}">{label}</figcaption>'
    return f'<figure style="{_TILE}" title="{escape(title)}">{shown}{name}</figure>'


def composite_text(composite: Composite) -> str:
    """The handle, and below it a line per kind of value; equal ones are one:

    lr on 2 ranks
    [0, 1] float  0.1
    """
    head = f"{composite} on {len(composite)} rank{'s' if len(composite) > 1 else ''}"
    try:
        infos = handles_of(composite).look(composite, _TEXT_CHARS)
    except PoolError as error:
        return f"{head}: {error}"
    lost = handles_of(composite).losses.of(key_of(composite)[0])
    # Type and text as one string, as `fold` takes it; no name of a type has a NUL.
    found = {rank: f"{info}\0{info.text or ''}" for rank, info in infos.items()}
    for rank in set(range(len(composite))) - set(infos):
        why = f"lost with rank {rank}, which {lost[rank]}" if rank in lost else ""
        found[rank] = f"no value\0{why}"
    lines = [head]
    for group in sorted(fold(found), key=lambda group: group.ranks):
        kind, _, text = group.text.partition("\0")
        mark = f"[{format_ranks(group.ranks)}] {kind}  "
        lines.append((mark + text.replace("\n", "\n" + " " * len(mark))).rstrip())
    return "\n".join(lines)
