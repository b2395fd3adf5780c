"""The GPUs of this machine as HTML. Runs on the client."""

from __future__ import annotations

from html import escape

from gpupool.core.machine.gpus import GpuTable, use_of
from gpupool.core.machine.topology import Gpu
from gpupool.notebook.page import markup
from gpupool.notebook.page.markup import Html

_COLUMNS = ("GPU", "name", "memory", "utilization", "temp.", "pool", "held by")
_CELL = ";vertical-align:top;white-space:nowrap"
_SHORT_UUID = 12  # characters; the text form has all of it
_TROUGH = (
    "height:6px;min-width:64px;border-radius:3px;margin-top:3px;overflow:hidden;"
    "background:rgba(128,128,128,.25)"
)
_BLUE = "#0072bd"
_FULL, _NEARLY = 0.9, 0.7  # of the memory: from there on red, amber


def gpu_table_html(table: GpuTable) -> str:
    """The GPU table with bars for memory and load, or why there is no GPU and what a pool uses."""
    if not table:
        return markup.card(markup.muted(table.none))
    rows = [_cells(gpu, row, table) for gpu, row in zip(table, table.rows(), strict=True)]
    return markup.card(markup.scroller(markup.table(_COLUMNS, rows, _CELL), "GPUs"))


def _cells(gpu: Gpu, row: dict[str, str], table: GpuTable) -> list[str]:
    """The cells of a row, in the order of `_COLUMNS`."""
    used, total, load = gpu.used_memory_bytes, gpu.total_memory_bytes, gpu.utilization_percent
    use = use_of(gpu, gpu.uuid in table.selected)
    share = used / total if used is not None and total else None
    # Green stands for what a pool can have, so not for memory of a GPU that others use.
    colour = markup.AMBER if use or (share or 0) >= _NEARLY else markup.GREEN
    colour = markup.RED if (share or 0) >= _FULL else colour
    return [
        row["index"],
        Html(escape(row["name"]) + _small(row["capability"], row["uuid"])),
        _meter(share, row["memory"], colour),
        _meter(None if load is None else load / 100, row["utilization"], _BLUE),
        row["temperature"],
        _use(gpu, table.selected.get(gpu.uuid), use),
        Html("<br>".join(escape(str(process)) for process in gpu.processes) or "-"),
    ]


def _small(capability: str, uuid: str) -> str:
    """What is looked for now and then: the compute capability and the UUID, below the name."""
    short = uuid if len(uuid) <= _SHORT_UUID else f"{uuid[:_SHORT_UUID]}…"
    shown = f"{capability} · {short}" if capability != "-" else short
    return (
        f'<br><span title="{escape(uuid)}" style="font-size:11px;opacity:.75">'
        f"{escape(shown)}</span>"
    )


def _use(gpu: Gpu, rank: str | None, use: str) -> Html:
    """What this notebook's pool makes of a GPU, or could, and what others do."""
    badges = markup.badge(rank, _BLUE) if rank is not None else ""
    badges += markup.badge(use, markup.AMBER) if use else ""
    if gpu.unavailable and not badges:
        style = "opacity:.75;min-width:130px;white-space:normal"
        return Html(f'<div style="{style}">no: {escape(gpu.unavailable)}</div>')
    return Html(badges or markup.badge("available", markup.GREEN))


def _meter(share: float | None, text: str, colour: str) -> Html:
    """A text over a bar that shows the share; the text alone where nobody knows it."""
    if share is None:
        return Html(escape(text))
    bar = f'<div style="height:6px;width:{100 * min(share, 1):.0f}%;background:{colour}"></div>'
    return Html(f'{escape(text)}<div style="{_TROUGH}">{bar}</div>')
