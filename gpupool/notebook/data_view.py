"""Pictures of what a datastore holds, and the table of what is wrong in it. Runs on the client.

They are `Any` here: this folder does not import `gpupool.data`, where they are made.
"""

from __future__ import annotations

from base64 import b64encode
from html import escape
from typing import Any

from gpupool.notebook.page import markup

_TILE = "margin:4px;width:132px;display:inline-block;vertical-align:top;text-align:center"
_PICTURE = "width:128px;height:96px;object-fit:contain"
_SMALL = 64  # pixels: smaller pictures are shown larger, as the pixels they are
_NAME = "overflow:hidden;text-overflow:ellipsis;white-space:pre;font-size:12px"
_NO_PICTURE = (
    f"height:94px;width:126px;border:1px dashed {markup.RED};display:flex;"
    "align-items:center;justify-content:center"
)


def preview_html(preview: Any) -> str:
    """A grid of pictures, each over its label; all is in the page, so a saved notebook has it."""
    tiles = "".join(map(_tile, preview))
    return markup.card(f"<div>{tiles}</div>", markup.muted(preview.title))


def check_html(result: Any) -> str:
    """The summary, and a table of the images that cannot be used."""
    summary, rows = result.shown()
    listed = list(rows)
    table = markup.table(result.HEADER, listed) if listed else ""
    return markup.card(f"<div>{escape(summary)}</div>", table)


def _tile(picture: Any) -> str:
    label = escape(picture.label)
    if picture.problem:
        shown = f'<div style="{_NO_PICTURE}">{escape(picture.problem)}</div>'
        title = picture.url
    else:
        data = b64encode(picture.png).decode()
        is_small = max(picture.width, picture.height) < _SMALL
        style = _PICTURE + (";image-rendering:pixelated" if is_small else "")
        shown = f'<img style="{style}" alt="{label}" src="data:image/png;base64,{data}">'
        title = f"{picture.url} ({picture.width} x {picture.height})"
    name = f'<figcaption title="{label}" style="{_NAME}">{label}</figcaption>'
    return f'<figure style="{_TILE}" title="{escape(title)}">{shown}{name}</figure>'
