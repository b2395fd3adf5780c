"""Small pieces of HTML that all pictures share. Runs on the client.

Colours are those of JupyterLab's theme where there is one, else they suit light and dark pages
alike, so that a saved notebook can be read anywhere.
"""

from __future__ import annotations

import functools
import gzip
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from gpupool.core.formatting import Table

FONT = "font-family:var(--jp-ui-font-family,system-ui,sans-serif);font-size:13px"
CODE = "font-family:var(--jp-code-font-family,monospace);font-size:13px"
CARD = (
    f"{FONT};border:1px solid rgba(128,128,128,.35);border-radius:6px;padding:8px 12px;"
    "margin:2px 0;max-width:1100px"
)
MAX_LINES = 40  # of a text that is shown at full length
GREEN, AMBER, RED, GREY = "#2da44e", "#bf8700", "#cf222e", "#8c959f"
_STATIC = Path(__file__).parents[1] / "static"


def ink(colour: str) -> str:
    """A colour for text: drawn towards the page's own, so that it is readable on light and dark."""
    return f"color-mix(in srgb,{colour} 65%,currentColor)"


def card(*parts: str) -> str:
    return f'<div style="{CARD}">{"".join(parts)}</div>'


def badge(text: str, colour: str) -> str:
    """A word in a coloured pill; the colour only repeats what the word says."""
    return (
        f'<span style="border:1px solid {colour};background:{colour}22;border-radius:10px;'
        f'padding:1px 8px;margin:0 4px">{escape(text)}</span>'
    )


def muted(text: str) -> str:
    return f'<span style="opacity:.7">{escape(text)}</span>'


def bar(inner: str, colour: str) -> str:
    """A block with a coloured edge at the left."""
    return (
        f'<div style="border-left:3px solid {colour};padding-left:10px;margin:6px 0">{inner}</div>'
    )


def code(text: str) -> str:
    return code_html(escape(text))


def code_html(inner: str) -> str:
    """Preformatted HTML; what is longer than a page scrolls, with the keyboard too."""
    style = f"{CODE};margin:2px 0;white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere"
    if inner.count("\n") < MAX_LINES:
        return f'<pre style="{style}">{inner}</pre>'
    style += f";max-height:{MAX_LINES}em;overflow-y:auto"
    return f'<pre tabindex="0" style="{style}">{inner}</pre>'


def progress(share: float, label: str) -> str:
    style = "width:16em;max-width:40%;vertical-align:middle;accent-color:#0072bd"
    return f'<progress value="{share:.3f}" aria-label="{escape(label)}" style="{style}"></progress>'


def scroller(inner: str, label: str) -> str:
    """A block that scrolls sideways where it is too wide, by keyboard too; `label` is its name."""
    return (
        f'<div style="overflow-x:auto" tabindex="0" role="region" aria-label="{escape(label)}">'
        f"{inner}</div>"
    )


def fold_out(title: str, inner: str, *, is_open: bool) -> str:
    state = " open" if is_open else ""
    summary = f'<summary style="cursor:pointer">{title}</summary>'
    return f"<details{state}>{summary}{inner}</details>"


def mark(text: str) -> str:
    """Text on a tinted ground, and underlined: colour is never the only sign."""
    style = f"background:{AMBER}44;color:inherit;border-radius:3px;text-decoration:underline"
    return f'<mark style="{style}">{escape(text)}</mark>'


@functools.cache
def static_text(*names: str) -> str:
    """Files of `static/` as one text: a module is loaded from a blob, and could import none."""
    return "\n".join((_STATIC / name).read_text("utf-8") for name in names)


def compact_style(style: str) -> str:
    """A style sheet without comments and line ends, for pages that are kept."""
    return re.sub(r"/\*.*?\*/|\n\s*", "", style, flags=re.DOTALL)


def packed_script(script: str) -> str:
    """A script that a page unpacks and runs, a third as long; it needs nothing from elsewhere."""
    lines = (line.strip() for line in script.splitlines())
    dense = "\n".join(line for line in lines if line and not line.startswith("//"))
    # As an element, not by `eval`: pages that allow the one may forbid the other. No time is in it,
    # so that a notebook that is run again differs only where its results do.
    packed = b64encode(gzip.compress(dense.encode(), mtime=0)).decode()
    return (
        "<script>(async()=>{const packed=Uint8Array.from(atob("
        f'"{packed}"),(c)=>c.charCodeAt(0));'
        'const stream=new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));'
        'const made=document.createElement("script");'
        "made.textContent=await new Response(stream).text();"
        "document.head.append(made);made.remove()})()</script>"
    )


def data_script(data: object, name: str) -> str:
    """Data for a script beside it, as JSON in an element of this class.

    Without "<" in it nothing ends the element early, or begins a comment or another script.
    """
    # JSON of browsers has no NaN. Other than ASCII is escaped, U+2028 too.
    packed = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" class="{name}">{packed}</script>'


class Html(str):
    """What stands in a cell of a table as it is."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]], style: str = "") -> str:
    """A table; all cells are text, unless they are `Html`. `style` is that of its cells."""
    cell = f'style="text-align:left;padding:2px 12px 2px 0{style}"'
    head = "".join(f'<th scope="col" {cell}>{escape(text)}</th>' for text in header)
    body = "".join(
        "<tr>" + "".join(f"<td {cell}>{_inner(text)}</td>" for text in row) + "</tr>"
        for row in rows
    )
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<table style="{FONT};margin:2px 0">{top}<tbody>{body}</tbody></table>'


def table_html(found: Table) -> str:
    head = f"<div><b>{escape(found.title)}</b></div>"
    return card(head, scroller(table(found.columns, found.rows), found.title))


def _inner(cell: str) -> str:
    return cell if isinstance(cell, Html) else escape(cell)
