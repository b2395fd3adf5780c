"""The GPUs of this machine as text and HTML. Runs on the client."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from gpupool.core.machine.gpus import GpuTable
from gpupool.core.machine.topology import Gpu
from gpupool.core.machine.uses import Use, holder_text
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
        f"<tr>{''.join(_cells(gpu, dict(zip(table.HEADER, row, strict=True)), table))}</tr>"
        for gpu, row in zip(table, table.rows(), strict=True)
    )
    body = (
        f'<table style="{markup.FONT};border-collapse:collapse"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )
    return markup.card(markup.scroller(body, "GPUs"))


def gpu_table_text(table: GpuTable) -> str:
    """The lines of its repr, which IPython would show as a list."""
    return repr(table)


def _cells(gpu: Gpu, row: dict[str, str], table: GpuTable) -> Iterator[str]:
    """The cells of a row, in the order of `_COLUMNS`."""
    yield _cell(escape(row["index"]))
    yield _cell(escape(row["name"]) + _small(row["capability"], row["uuid"]))
    for column in ("memory", "utilization"):
        share = table.share(gpu, column)
        colour = _BLUE if column == "utilization" else _alarm(share or 0.0, gpu.uuid in table.uses)
        text = escape(row[column])
        yield _cell(text if share is None else _meter(share, text, colour))
    yield _cell(escape(row["temperature"]))
    use = _use(gpu, table.selected.get(gpu.uuid), table.uses.get(gpu.uuid))
    yield _cell(use, wraps=True)
    holders = [holder_text(process) for process in gpu.processes]
    yield _cell("<br>".join(map(escape, holders)) or "-")


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


def _use(gpu: Gpu, rank: str | None, use: Use | None) -> str:
    """What this notebook's pool makes of a GPU, or could, and what others do."""
    pills = [_pill(rank, _BLUE)] if rank is not None else []
    if use is not None:
        pills.append(_pill(use.words, markup.AMBER))
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
