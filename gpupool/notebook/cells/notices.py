"""Notices of a cell, as HTML and text. Pure functions; runs on the client."""

from __future__ import annotations

from html import escape

from gpupool.core.formatting import format_ranks
from gpupool.notebook.page import markup
from gpupool.notebook.pool.pool_bar import interrupt_button
from gpupool.pool.notices import Notice


def notice_html(text: str) -> str:
    """A notice as an amber bar; one about ranks as a table of them, with an Interrupt button."""
    if not isinstance(text, Notice) or not text.places:
        return markup.bar(markup.code(text), markup.AMBER)
    rows = [
        (f"{format_ranks(ranks)}{f' ({host})' * bool(host)}", doing or "running", line)
        for ranks, doing, line, host in text.places
    ]
    table = markup.table(("ranks", "where", "line"), rows)
    parts = [f"<b>{escape(text.head)}</b>", table, escape(text.advice), interrupt_button()]
    return markup.bar("".join(f"<div>{part}</div>" for part in parts if part), markup.AMBER)
