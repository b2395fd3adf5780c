"""How a cell's output is drawn, from plain data."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from gpupool.core.errors import RankError, SpmdError
from gpupool.notebook.spmd_picture import groups_html, groups_text
from gpupool.notebook.spmd_view import LineView
from gpupool.pool.result import RankOutput
from gpupool.spmd.cell import CellReport
from gpupool.spmd.output import fold


def html_of(texts: dict[int, str], *errors: RankError) -> str:
    error = SpmdError({e.rank: e for e in errors}, len(texts)) if errors else None
    report = CellReport({rank: RankOutput() for rank in texts}, 0.5, error=error)
    return groups_html(fold(texts), report)


def marked(html: str) -> list[str]:
    return re.findall(r'<span style="background:[^>]*>([^<]*)</span>', html)


def test_lines_that_differ_from_the_majority_are_marked() -> None:
    html = html_of({0: "head\nrows 8", 1: "head\nrows 7", 2: "head\nrows 8"})
    assert marked(html) == ["rows 7"]
    assert "differs in 1 line" in html
    assert html.index("[0, 2]") < html.index("identical on 2 ranks") < html.index("[1]")


def test_nothing_is_marked_where_every_rank_differs_or_none() -> None:
    for texts in ({0: "head\na", 1: "head\nb"}, {0: "a\nb", 1: "a\nb"}, {0: "", 1: "a", 2: ""}):
        assert marked(html_of(texts)) == []
        assert "differs" not in html_of(texts)


def test_single_lines_of_different_ranks_take_one_line_each() -> None:
    html = html_of({0: "10", 1: "11"})
    assert "[0] 10\n[1] 11</pre>" in html
    assert "<details" not in html


def test_ranks_that_failed_waited_or_were_interrupted_are_counted_apart() -> None:
    html = html_of(
        {0: "x", 1: "x", 2: "x", 3: "x"},
        RankError(1, "ValueError", "bad", failed_at=1.0),
        RankError(2, "RuntimeError", "connection closed", failed_at=2.0, freed=True),
        RankError(3, "KeyboardInterrupt", "", failed_at=2.0),
    )
    for badge in ("✓ 1 ok", "✗ 1 failed", "1 interrupted", "1 freed from waiting"):
        assert badge in html
    assert "500 ms" in html


@given(st.dictionaries(st.integers(0, 9), st.text("ab<&\n", max_size=6), min_size=1))
@settings(deadline=None)
def test_the_text_holds_every_line_of_every_rank(texts: dict[int, str]) -> None:
    shown = groups_text(fold(texts)).split("\n")
    for text in filter(None, texts.values()):
        first, *others = text.split("\n")
        assert any(line.endswith(f"] {first}") for line in shown)
        assert all(any(line.endswith(f" {other}") for line in shown) for other in others)


@given(st.lists(st.text("ab\n", max_size=4), max_size=12))
@settings(deadline=None)
def test_lines_are_whole_however_the_stream_is_cut(pieces: list[str]) -> None:
    view = LineView()
    for piece in pieces:
        view.on_output(0, "stdout", piece)
    view._queue.extend(view._lines.rest(0))
    lines = [line for _, line in view._queue]
    text = "".join(pieces)
    assert lines == (text.removesuffix("\n").split("\n") if text else [])
