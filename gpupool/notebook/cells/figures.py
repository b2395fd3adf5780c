"""Figures and tables of the ranks, as HTML and text. Pure functions; runs on the client."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from gpupool.core.formatting import format_ranks
from gpupool.notebook.page import ansi, markup
from gpupool.spmd.output import fold_displays

MAX_FIGURE_CHARS = 24_000_000  # of all figures of a cell together
_SIZE = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?%?")  # what `Image(width=...)` takes: 200, "50%"
_IMAGES = ("image/png", "image/jpeg", "image/gif")

Bundle = Mapping[str, Any]


def is_rich(bundle: Bundle) -> bool:
    """Whether there is more of it than text."""
    return bool(set(bundle["data"]) - {"text/plain"})


def is_embeddable(bundle: Bundle) -> bool:
    """Whether it can stand inside our HTML; others (widgets, plots of a library's own) cannot."""
    data = bundle["data"]
    known = any(mime in data for mime in ("text/html", "image/svg+xml", *_IMAGES))
    # Widgets and plotly have HTML as well, but only as a fallback: their own type shows more.
    own = any(mime.startswith("application/") and mime != "application/pdf" for mime in data)
    return known and not own


def figures_html(figures: Mapping[int, Sequence[Bundle]]) -> list[str]:
    """What the ranks have displayed: the first of each together, then the second of each, ...

    Equal ones are there once; of those that differ the first is open.
    """
    num_chars, blocks = 0, []
    for n in range(max(map(len, figures.values()), default=0)):
        nth = {rank: [bundles[n]] for rank, bundles in figures.items() if n < len(bundles)}
        panels = [
            (format_ranks(ranks), bundle_html(bundle)) for ranks, bundle in fold_displays(nth)
        ]
        # Counted after folding: equal figures of all ranks are one.
        num_chars += sum(len(inner) for _, inner in panels)
        if num_chars > MAX_FIGURE_CHARS:
            blocks.append(markup.bar(markup.muted("[... more figures left out ...]"), markup.GREY))
            break
        blocks.append(_block(panels, len(nth)))
    return blocks


def figures_text(figures: Mapping[int, Sequence[Bundle]]) -> str:
    """The text that figures have for those who cannot see them."""
    return "\n".join(
        f"[{format_ranks(ranks)}] {bundle['data'].get('text/plain', '(a figure)')}"
        for ranks, bundle in fold_displays(figures)
    )


def bundle_html(bundle: Bundle) -> str:
    """One thing that was displayed, as HTML."""
    data = bundle["data"]
    if "text/html" in data:
        return str(data["text/html"])
    alt = escape(ansi.plain(str(data.get("text/plain", "figure"))).strip("<>"), quote=True)
    for mime in _IMAGES:
        if mime in data:
            # base64 may come in several lines; in a data URL it is one.
            octets = "".join(str(data[mime]).split())
            return _image(f"data:{mime};base64,{escape(octets)}", alt, bundle, mime)
    if "image/svg+xml" in data:
        # As an image and not inline: JupyterLab takes SVG out of notebooks that are not trusted.
        svg = f"data:image/svg+xml;utf8,{quote(str(data['image/svg+xml']))}"
        return _image(svg, alt, bundle, "image/svg+xml")
    return markup.code(str(data.get("text/plain", "")))


def _image(source: str, alt: str, bundle: Bundle, mime: str) -> str:
    known = (bundle.get("metadata") or {}).get(mime) or {}
    known = known if isinstance(known, Mapping) else {}
    sizes = {key: str(known.get(key, "")) for key in ("width", "height")}
    # Matched, as it comes from a rank and goes into an attribute of the page.
    size = "".join(f' {key}="{n}"' for key, n in sizes.items() if _SIZE.fullmatch(n))
    style = "max-width:100%;height:auto"
    # matplotlib's transparent figures have dark text: on a dark page nothing would be seen.
    if known.get("needs_background") == "light":
        style += ";background:#fff"
    return f'<img src="{source}" alt="{alt}"{size} style="{style}">'


def _block(panels: Sequence[tuple[str, str]], num_ranks: int) -> str:
    name, inner = panels[0]
    if len(panels) == 1:
        note = f"identical on {num_ranks} ranks" if num_ranks > 1 else ""
        title = f"<b>[{name}]</b> {markup.muted(note)}"
    else:
        each = "one per rank" if len(panels) == num_ranks else f"of {num_ranks} ranks"
        what = "figures" if all("<img" in html for _, html in panels) else "displayed"
        title = f"<b>{what}</b> {markup.muted(f'{len(panels)}, {each}')}"
        inner = "".join(
            markup.fold_out(f"<b>[{name}]</b>", html, is_open=n == 0)
            for n, (name, html) in enumerate(panels)
        )
    return markup.bar(markup.fold_out(title, inner, is_open=True), markup.GREY)
