"""Figures and tables of the ranks, as HTML and text. Pure functions; runs on the client."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from typing import Any
from urllib.parse import quote

from gpupool.core.formatting import format_ranks
from gpupool.notebook.page import ansi, markup
from gpupool.spmd.output import fold_displays

_SIZE = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?%?")  # what `Image(width=...)` takes: 200, "50%"
_SVG = "image/svg+xml"
_IMAGES = ("image/png", "image/jpeg", "image/gif", _SVG)

Bundle = Mapping[str, Any]


def is_rich(bundle: Bundle) -> bool:
    """Whether there is more of it than text."""
    return bool(set(bundle["data"]) - {"text/plain"})


def is_embeddable(bundle: Bundle) -> bool:
    """Whether it can stand inside our HTML; others (widgets, plots of a library's own) cannot."""
    data = bundle["data"]
    known = any(mime in data for mime in ("text/html", *_IMAGES))
    # Widgets and plotly have HTML as well, but only as a fallback: their own type shows more.
    own = any(mime.startswith("application/") and mime != "application/pdf" for mime in data)
    return known and not own


def figures_html(figures: Mapping[int, Bundle]) -> str:
    """Figures of ranks as a block; equal ones are there once, of others the first is open."""
    folded = fold_displays({rank: [bundle] for rank, bundle in figures.items()})
    if not folded:
        return ""
    inner = bundle_html(folded[0][1])
    note = f"identical on {len(figures)} ranks" if len(figures) > 1 else ""
    if len(folded) > 1:
        note = f"{len(folded)} that differ"
        inner = "".join(
            markup.fold_out(f"<b>[{format_ranks(ranks)}]</b>", bundle_html(one), is_open=n == 0)
            for n, (ranks, one) in enumerate(folded)
        )
    title = f"<b>[{format_ranks(figures)}]</b> {markup.muted(note)}"
    return markup.bar(markup.fold_out(title, inner, is_open=True), markup.GREY)


def figures_text(figures: Mapping[int, Bundle]) -> str:
    """The text that figures have for those who cannot see them."""
    folded = fold_displays({rank: [bundle] for rank, bundle in figures.items()})
    return "\n".join(
        f"[{format_ranks(ranks)}] {bundle['data'].get('text/plain', '(a figure)')}"
        for ranks, bundle in folded
    )


def bundle_html(bundle: Bundle) -> str:
    """One thing that was displayed, as HTML."""
    data = bundle["data"]
    if "text/html" in data:
        return str(data["text/html"])
    for mime in _IMAGES:
        if mime in data:
            # base64 may come in several lines; in a data URL it is one.
            octets = escape("".join(str(data[mime]).split()))
            # An image, not inline: JupyterLab takes SVG out of notebooks that are not trusted.
            source = f"utf8,{quote(str(data[mime]))}" if mime == _SVG else f"base64,{octets}"
            return _image(f"data:{mime};{source}", bundle, mime)
    return markup.code(str(data.get("text/plain", "")))


def _image(source: str, bundle: Bundle, mime: str) -> str:
    alt = ansi.plain(str(bundle["data"].get("text/plain", "figure"))).strip("<>")
    known = (bundle.get("metadata") or {}).get(mime) or {}
    known = known if isinstance(known, Mapping) else {}
    sizes = {key: str(known.get(key, "")) for key in ("width", "height")}
    # Matched, as it comes from a rank and goes into an attribute of the page.
    size = "".join(f' {key}="{n}"' for key, n in sizes.items() if _SIZE.fullmatch(n))
    style = "max-width:100%;height:auto"
    return f'<img src="{source}" alt="{escape(alt)}"{size} style="{style}">'
