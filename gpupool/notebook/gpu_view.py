"""The GPUs of this machine as text and HTML. Runs on the client."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from gpupool.core.machine.gpus import GpuTable, use_of
from gpupool.core.machine.topology import Gpu
from gpupool.notebook.page import markup

_COLUMNS = ("GPU", "name", "memory", "utilization", "temp.", "pool", "held by")
_CELL = "text-align:left;padding:3px 14px 3px 0;vertical-align:top"
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
    head = "".join(f'<th scope="col" style="{_CELL}">{text}</th>' for text in _COLUMNS)
    rows = "".join(
        f"<tr>{''.join(_cells(gpu, row, table))}</tr>"
        for gpu, row in zip(table, table.rows(), strict=True)
    )
    body = (
        f'<table style="{markup.FONT};border-collapse:collapse"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )
    return markup.card(markup.scroller(body, "GPUs"))


def _cells(gpu: Gpu, row: dict[str, str], table: GpuTable) -> Iterator[str]:
    """The cells of a row, in the order of `_COLUMNS`."""
    yield _cell(escape(row["index"]))
    yield _cell(escape(row["name"]) + _small(row["capability"], row["uuid"]))
    used, total, load = gpu.used_memory_bytes, gpu.total_memory_bytes, gpu.utilization_percent
    use = use_of(gpu, gpu.uuid in table.selected)
    memory = escape(row["memory"])
    if used is not None and total:
        memory = _meter(used / total, memory, _alarm(used / total, bool(use)))
    yield _cell(memory)
    utilization = escape(row["utilization"])
    yield _cell(utilization if load is None else _meter(load / 100, utilization, _BLUE))
    yield _cell(escape(row["temperature"]))
    yield _cell(_use(gpu, table.selected.get(gpu.uuid), use), wraps=True)
    yield _cell("<br>".join(escape(str(process)) for process in gpu.processes) or "-")


def _cell(inner: str, wraps: bool = False) -> str:
    style = f"{_CELL};min-width:130px" if wraps else f"{_CELL};white-space:nowrap"
    return f'<td style="{style}">{inner}</td>'


def _small(capability: str, uuid: str) -> str:
    """What is looked for now and then: the compute capability and the UUID, below the name."""
    short = uuid if len(uuid) <= _SHORT_UUID else f"{uuid[:_SHORT_UUID]}…"
    shown = f"{capability} · {short}" if capability != "-" else short
    return (
        f'<br><span title="{escape(uuid)}" style="font-size:11px;opacity:.75">'
        f"{escape(shown)}</span>"
    )


def _use(gpu: Gpu, rank: str | None, use: str) -> str:
    """What this notebook's pool makes of a GPU, or could, and what others do."""
    pills = [_pill(rank, _BLUE)] if rank is not None else []
    if use:
        pills.append(_pill(use, markup.AMBER))
    if pills:
        return " ".join(pills)
    if gpu.unavailable:
        return f'<span style="opacity:.75">no: {escape(gpu.unavailable)}</span>'
    return _pill("available", markup.GREEN)


def _meter(share: float, text: str, colour: str) -> str:
    """HTML: a text over a bar that shows the share."""
    percent = 100 * min(share, 1)
    bar = f'<div style="height:6px;width:{percent:.0f}%;background:{colour}"></div>'
    return f'{text}<div style="{_TROUGH}">{bar}</div>'


def _alarm(share: float, has_others: bool) -> str:
    """Green stands for what a pool can have, so not for memory of a GPU that others use."""
    if share >= _FULL:
        return markup.RED
    return markup.AMBER if has_others or share >= _NEARLY else markup.GREEN


def _pill(text: str, colour: str) -> str:
    style = f"border:1px solid {colour};border-radius:10px;padding:0 8px;white-space:nowrap"
    return f'<span style="{style}">{escape(text)}</span>'
