"""A training or loop as HTML: the parts of the live picture, and the one that stays. Pure; client.

The HTML needs no kernel and no network. Its plots are an image; where scripts may run, one puts
plots in its place that can be read off and zoomed, from the state beside the image. Where scripts,
styles and SVG are taken out (GitHub, a notebook that is not trusted) the image, the tables and all
words remain.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

from gpupool.notebook.monitor import plots
from gpupool.notebook.monitor.board import Board, History, board_of
from gpupool.notebook.page import markup

Part = Callable[[str, str, str], str]  # (name, HTML within, CSS classes) -> element


def history_html(history: History) -> str:
    """Plots, tables and the table of ranks as one self-contained piece of HTML that stays.

    Its size is bounded, however long the training is.
    """
    return still_html(board_of(history))


def still_html(board: Board) -> str:
    """The picture that stays: its plots answer the pointer."""
    image = image_of(board)
    state = markup.data_script(board.plots, "gpupool-state") if image else ""
    end = _style("monitor.css") + plots_script()
    return _frame("gpupool-training", board, image + state, _element, end)


def live_html(board: Board, image: str, part: Part) -> str:
    """The picture of what goes on, of elements that `part` makes."""
    return _frame("gpm gpl-frame", board, image, part, _style("plots.css", "monitor.css"))


def _frame(kind: str, board: Board, drawn: str, part: Part, end: str) -> str:
    of = board.parts.get
    return (
        f'<div class="{kind} gpm-frame"><div class="gpm-header">'
        f"{part('header', of('header', ''), 'gpm-head')}"
        # where no page puts buttons into it
        f"{part('buttons', markup.muted(board.hint) if board.hint else '', 'gpm-buttons')}</div>"
        f"{part('notices', of('notices', ''), '')}"
        f'<div class="gpm-body">{part("plots", drawn, "gpm-plots gpm-image")}'
        f"{part('tables', of('tables', ''), 'gpm-tables')}</div>"
        f"{part('ranks', of('ranks', ''), '')}{end}</div>"
    )


def _element(_name: str, inner: str, looks: str) -> str:
    return f'<div class="{looks}">{inner}</div>' if inner else ""


def image_of(board: Board) -> str:
    """The plots as an image; "" without any point."""
    has_any = any(any(lines.values()) for lines in board.plots["lines"].values())
    return plots.image(**board.plots) if has_any else ""


@functools.cache
def plots_script() -> str:
    """What puts plots that answer in the place of a page's images."""
    # Within a function: nothing is seen from outside, and a page may have it several times.
    code = markup.static_text("plots.js", "stills.js")
    # Only plots that the script makes need their style, and in it that takes half the room.
    style = json.dumps(markup.compact_style(markup.static_text("plots.css")))
    return markup.packed_script(f"(() => {{\n{code}exploreStills({style});\n}})()")


def _style(*names: str) -> str:
    return f"<style>{markup.compact_style(markup.static_text(*names))}</style>"
