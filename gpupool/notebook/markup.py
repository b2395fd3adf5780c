"""Small pieces of HTML that all pictures share. Runs on the client.

Colours are those of JupyterLab's theme where there is one, else they suit light and dark pages
alike, so that a saved notebook can be read anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

FONT = "font-family:var(--jp-ui-font-family,system-ui,sans-serif);font-size:13px"
CODE = "font-family:var(--jp-code-font-family,monospace);font-size:13px"
CARD = (
    f"{FONT};border:1px solid rgba(128,128,128,.35);border-radius:6px;padding:8px 12px;"
    "margin:2px 0;max-width:1100px"
)
GREEN, AMBER, RED, GREY = "#2da44e", "#bf8700", "#cf222e", "#8c959f"


def card(*parts: str) -> str:
    """Parts in a frame."""
    return f'<div style="{CARD}">{"".join(parts)}</div>'


def badge(text: str, colour: str) -> str:
    """A word in a coloured pill; the colour only repeats what the word says."""
    return (
        f'<span style="border:1px solid {colour};background:{colour}22;border-radius:10px;'
        f'padding:1px 8px;margin:0 4px">{escape(text)}</span>'
    )


def muted(text: str) -> str:
    """Text of less weight."""
    return f'<span style="opacity:.7">{escape(text)}</span>'


def bar(inner: str, colour: str) -> str:
    """A block with a coloured edge at the left."""
    return (
        f'<div style="border-left:3px solid {colour};padding-left:10px;margin:6px 0">{inner}</div>'
    )


def code(text: str) -> str:
    """Preformatted text."""
    return code_html(escape(text))


def code_html(inner: str) -> str:
    """Preformatted HTML."""
    return f'<pre style="{CODE};margin:2px 0;white-space:pre-wrap">{inner}</pre>'


def highlight(text: str) -> str:
    """Text on a tinted ground, for what deserves a second look."""
    return f'<span style="background:{AMBER}44;border-radius:3px">{escape(text)}</span>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; all cells are text."""
    cell = 'style="text-align:left;padding:2px 12px 2px 0"'
    head = "".join(f'<th scope="col" {cell}>{escape(text)}</th>' for text in header)
    body = "".join(
        "<tr>" + "".join(f"<td {cell}>{escape(text)}</td>" for text in row) + "</tr>"
        for row in rows
    )
    return f'<table style="{FONT}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
