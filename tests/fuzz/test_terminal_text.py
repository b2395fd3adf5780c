"""Any text with codes of a terminal in it: no exception, linear time, and no markup."""

from __future__ import annotations

import re
from html import unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.notebook.cells.lines import fold_bars
from gpupool.notebook.page import ansi
from gpupool.pool.calls.terminal_text import as_shown, line_as_shown
from gpupool.spmd.output import fold, normal
from tests.fuzz.limits import fuzzed, only_our_errors

PIECES = [
    *("\x1b", "[", "]", "m", "A", "K", "J", ";", "?", "38;5;", "48;2;", "31", "0", "999999999999"),
    *("\x07", "\x1b\\", "\r", "\n", "\b", "<", ">", "&", '"', "<script>", "text", "\x9b", "٣"),
]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=30).map("".join)


def text_of(html: str) -> str:
    return unescape(re.sub("<[^>]*>", "", html))


@fuzzed
@given(texts)
def test_any_text_is_drawn(text: str) -> None:
    with only_our_errors():
        html, plain = ansi.to_html(text), ansi.plain(text)
        coloured, shown = ansi.without_moves(text), as_shown(text)
        line_as_shown(text)
        fold({0: text, 1: plain}, alike=True)
        fold_bars([(0, text), (1, plain)])
    assert {*re.findall("<(?!/?span[ >])", html)} == set()
    assert {*re.findall(r'<span([^"]*)"', html)} <= {" style="}
    assert text_of(html) == text_of(ansi.to_html(plain)) or "\x1b" in plain
    assert len(re.findall("\x1b", coloured)) <= text.count("\x1b")
    assert len(shown) <= len(text)


@pytest.mark.long
@pytest.mark.parametrize(
    "piece",
    [
        *("\x1b]", "\x1b[", "\x1b", "\x1b[9", "\x1b[;", "\x1b[31mx", "\x1b]x", "\x1b[?", "a\x1b[A"),
        *("a\b", "\r", "x\r", "\r\n", "\x1b[A\n", "\x1b[K", "\n\x1b[A", "1:", "1.", "0x", "pid   "),
        *("1", "9", ";", "38;", "38;5;", "1 ", "\x1b[38;5;1mx", "\x1b[A", "a\r\x1b[A"),
    ],
)
def test_long_texts_take_no_longer(piece: str) -> None:
    text = piece * (160_000 // len(piece))
    for one in (text, f"\x1b[{text}mx", f"\x1b]{text}", f"\x1b[{text}A"):
        with only_our_errors():
            ansi.to_html(one)
        with only_our_errors():
            ansi.without_moves(one)
        with only_our_errors():
            as_shown(one)
        with only_our_errors():
            normal(one)
