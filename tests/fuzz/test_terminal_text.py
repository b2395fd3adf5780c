"""Any text with codes of a terminal in it: no exception, linear time, and no markup.

Names that anybody may have given steer no terminal, in messages and tables.
"""

from __future__ import annotations

import os
import re
from html import unescape
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import gpupool.data.reading.decode  # noqa: F401 - that it imports torch counts for no file
from gpupool.core.errors import DataError, SampleError
from gpupool.data.datastores.images import ImageDatastore
from gpupool.data.stores.folder import FileRef, Folder
from gpupool.notebook.cells.lines import fold_bars
from gpupool.notebook.page import ansi
from gpupool.pool.calls.terminal_text import as_shown, line_as_shown
from gpupool.spmd.output import fold, normal
from tests.fuzz.limits import assert_plain, fuzzed, only_our_errors
from tests.support.raising import raises

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
        for draw in (ansi.to_html, ansi.without_moves, as_shown, normal):
            with only_our_errors():
                draw(one)


# ---- names -----------------------------------------------------------------------------------

EVIL = "bad\x1b]0;evil\x07\x1b[2J\r\n\x9b31m\u202egpj\u2066.png"
CONTROLS = {*map(chr, (*range(32), *range(127, 160))), *"\u2028\u2029\u202a\u202e\u2066\u2069"}
keys = st.text(st.characters(exclude_characters="/"), min_size=1, max_size=40).filter(
    lambda key: not key.startswith(".")
)


def assert_steers_nothing(*shown: str) -> None:
    for text in shown:
        assert not CONTROLS & {*text.replace("\n", "")}, repr(text)


@fuzzed
@given(keys)
@example(EVIL)
def test_a_key_in_a_message(key: str) -> None:
    folder = Folder("memory://none")
    with pytest.raises(DataError) as caught:
        folder.read(FileRef(key, 7))
    assert_plain(str(caught.value))
    assert "\n" not in str(caught.value)
    assert_steers_nothing(folder.name(key), getattr(caught.value, "url", ""))


@pytest.mark.parametrize("name", [EVIL, "日本\u3000語.png", "Bildschirm\u202f9 Uhr.png"])
def test_files_of_a_disk_are_shown_and_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).write_bytes(b"no image")
    ds = ImageDatastore(str(tmp_path))
    with raises(SampleError) as caught:
        ds[0]
    assert_plain(str(caught.value))
    shown = repr(ds.check())
    assert_steers_nothing(shown, repr(ds.preview(1)), *ds.paths, caught.value.url)
    assert (os.path.exists(ds.paths[0])) == (name != EVIL)  # what is printable stays what it is
