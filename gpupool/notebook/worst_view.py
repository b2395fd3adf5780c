"""The samples with the highest losses as a grid of pictures, or a table. Runs on the client."""

from __future__ import annotations

from base64 import b64encode
from html import escape
from typing import TYPE_CHECKING

from gpupool.core.formatting import short_name
from gpupool.notebook.page import markup

if TYPE_CHECKING:
    from gpupool.core.wire.replies import WorstSample
    from gpupool.training.worst import WorstSamples

_TILE = "margin:4px;width:140px;display:inline-block;vertical-align:top;text-align:center"
_PICTURE = "width:128px;height:96px;object-fit:contain"
_LINE = "overflow:hidden;text-overflow:ellipsis;white-space:nowrap;font-size:12px"
_NAME_CHARS = 18  # of a class: as many as a tile is wide
_SMALL = 64  # pixels: smaller pictures are shown larger, as the pixels they are


def worst_html(worst: WorstSamples) -> str:
    """A picture of each sample over what was found and what is true; without pictures a table."""
    head = f"<div><b>Worst samples</b> {markup.muted(worst.summary())}</div>"
    rows = worst.rows()
    if not any(sample.png for sample in worst.samples):
        return markup.card(head, markup.table(("loss", "found", "true", "index", "file"), rows))
    tiles = "".join(_tile(sample, *row) for sample, row in zip(worst.samples, rows, strict=True))
    return markup.card(head, f"<div>{tiles}</div>")


def _tile(sample: WorstSample, loss: str, found: str, true: str, index: str, file: str) -> str:
    has_class = sample.found is not None
    shown, actual = (escape(short_name(name, _NAME_CHARS)) for name in (found, true))
    said = f"found {found}, true {true}" if has_class else ""
    title = ", ".join(filter(None, [said, f"loss {loss}", f"sample {index}", file]))
    data = b64encode(sample.png).decode()
    style = _PICTURE + (";image-rendering:pixelated" if max(sample.size) < _SMALL else "")
    picture = f'<img style="{style}" alt="{escape(title)}" src="data:image/png;base64,{data}">'
    lines = [f"<b>{shown}</b>", f"true: {actual}"] if has_class else []
    if has_class and sample.found == sample.true:  # found, and with a high loss all the same
        lines = [f"<b>{shown}</b>", "true: the same"]
    name = file.rpartition("/")[2]
    lines += [f"loss {escape(loss)}", markup.muted(f"#{index}" + (f" {name}" if name else ""))]
    text = "".join(f'<div style="{_LINE}">{line}</div>' for line in lines)
    return (
        f'<figure style="{_TILE}" title="{escape(title)}">{picture}'
        f"<figcaption>{text}</figcaption></figure>"
    )
