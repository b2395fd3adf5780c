"""How a cell's output is drawn, from plain data."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpupool.core.errors import RankError, SpmdError
from gpupool.core.wire.output import OutputKind
from gpupool.notebook.cells.lines import FOLD_WITHIN_S, Lines, Merger, fold_bars, merge
from gpupool.notebook.cells.picture import Look, groups_text, report_html, report_text
from gpupool.notebook.cells.views import ends_quietly
from gpupool.notebook.page import ansi
from gpupool.pool.calls.output import RankOutput
from gpupool.pool.calls.terminal_text import as_shown
from gpupool.spmd.cell import CellReport
from gpupool.spmd.output import fold

LINE = st.text("ab", max_size=3)


def report_of(texts: dict[int, str], *errors: RankError) -> CellReport:
    outputs = {rank: RankOutput() for rank in texts}
    for rank, text in texts.items():
        outputs[rank].add_text(text)
    error = SpmdError({e.rank: e for e in errors}, len(texts)) if errors else None
    return CellReport(outputs, 0.5, error=error)


def html_of(texts: dict[int, str], *errors: RankError) -> str:
    return report_html(report_of(texts, *errors), Look())


def with_figures(figures: dict[int, list[dict[str, str]]]) -> str:
    report = report_of(dict.fromkeys(figures, ""))
    for rank, bundles in figures.items():
        for data in bundles:
            report.outputs[rank].add_display(OutputKind.DISPLAY, {"data": data})
    return report_html(report, Look())


def marked(html: str) -> list[str]:
    return re.findall(r"<mark [^>]*>([^<]*)</mark>", html)


def test_words_that_differ_from_the_majority_are_marked() -> None:
    html = html_of({0: "head\nrows 8", 1: "head\nrows 7", 2: "head\nrows 8"})
    assert marked(html) == ["7"]
    assert "differs from [0, 2] in 1 line" in html
    assert html.index("[0, 2]") < html.index("identical on 2 ranks") < html.index("<b>[1]</b>")


def test_of_two_ranks_that_say_nearly_the_same_the_second_is_compared_with_the_first() -> None:
    assert marked(html_of({0: "head\nrows 8", 1: "head\nrows 7"})) == ["7"]


def test_nothing_is_marked_where_every_rank_says_something_else_or_none_does() -> None:
    for texts in ({0: "a\nb", 1: "c\nd"}, {0: "a\nb", 1: "a\nb"}, {0: "", 1: "a", 2: ""}):
        assert marked(html_of(texts)) == []
        assert "differs" not in html_of(texts)


def test_a_line_less_is_a_difference_too() -> None:
    assert "lacks 1 line" in html_of({0: "a\nb\nc", 1: "a\nb\nc", 2: "a\nb"})


def test_ranks_that_differ_in_addresses_and_times_alone_are_one_group_with_a_note() -> None:
    html = html_of({r: f"<A at 0x7f{r}1234> took 1.0{r} s, pid {r}77\nend" for r in range(3)})
    assert "alike on 3 ranks" in html
    assert "(shown: rank 0)" in html
    assert "0x7f01234" in html  # the real text


def test_a_rank_that_took_much_longer_is_not_alike() -> None:
    html = html_of({0: "took 1.0 s", 1: "took 1.1 s", 2: "took 60.0 s"})
    assert marked(html) == ["60.0"]
    assert "<b>[2]</b>" in html


def test_single_lines_of_different_ranks_take_one_line_each() -> None:
    html = html_of({0: "10", 1: "11"})
    assert "<b>[0]</b> 10\n<b>[1]</b> 11</pre>" in html
    assert "<details" not in html


def test_a_long_output_is_cut_in_the_middle_and_names_what_has_it_all() -> None:
    text = "\n".join(map(str, range(1000)))
    report = report_of({0: text, 1: text})
    for shown in (report_text(report, Look(name="res")), report_html(report, Look(name="res"))):
        assert "[... 750 lines left out: res.text(0) ...]" in shown
        assert "199" in shown
        assert "\n200\n" not in shown
        assert "999" in shown


def test_lines_without_end_are_cut_too() -> None:
    assert len(html_of({0: "x" * 5_000_000})) < 200_000


def test_ranks_that_failed_waited_or_were_interrupted_are_counted_apart() -> None:
    html = html_of(
        {0: "x", 1: "x", 2: "x", 3: "x"},
        RankError(1, "ValueError", "bad", failed_at=1.0),
        RankError(2, "RuntimeError", "connection closed", failed_at=2.0, freed=True),
        RankError(3, "KeyboardInterrupt", "", failed_at=2.0),
    )
    for badge in ("✓ 1 ok", "✗ 1 failed", "1 interrupted", "1 freed from a collective"):
        assert badge in html
    assert "500 ms" in html


def test_the_rank_that_failed_first_is_open_and_equal_tracebacks_are_folded() -> None:
    trace = "Cell In[3], line 2\n      1 x = 1\n----> 2 dist.all_reduce(x)\nRuntimeError: gone"
    html = html_of(
        dict.fromkeys(range(4), ""),
        RankError(2, "ValueError", "bad <row>", "\x1b[31m----> 7\x1b[0m boom", failed_at=1.0),
        *(RankError(r, "RuntimeError", "gone", trace, 2.0, freed=True) for r in (0, 1, 3)),
    )
    first, others = re.findall(r"<details.*?</details>", html, re.DOTALL)
    assert first.startswith("<details open>")
    assert "[2]" in first
    assert "failed first" in first
    assert "bad &lt;row&gt;" in first
    assert "color:color-mix(in srgb,#cf222e" in first
    assert others.startswith("<details><summary")
    assert "[0, 1, 3]" in others
    assert "freed from all_reduce()" in others
    assert "same traceback on 3 ranks, folded" in others


def test_equal_figures_are_there_once_and_others_in_tabs_that_need_no_script() -> None:
    html = with_figures({r: [{"text/html": "<i>both</i>"}, {"image/png": f"P{r}"}] for r in (0, 1)})
    assert html.count("<i>both</i>") == 1
    assert html.count('type="radio"') == 3  # 0, 1 and all
    assert html.count("checked>") == 1
    assert "<script" not in html
    for rank in (0, 1):  # where styles are taken out, each stands under its name
        assert f'<b>[{rank}]</b></div><img src="data:image/png;base64,P{rank}"' in html
    assert 'alt="' in html


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        *((300, "300"), ("50%", "50%"), ("2.5", "2.5")),
        *(("20em", None), ('1" onload="x', None), ({}, None)),
    ],
)
def test_a_figure_has_the_size_that_was_asked_for(width: object, shown: str | None) -> None:
    report = report_of({0: ""})
    data = {"image/png": "AAAA", "text/plain": "<Figure>"}
    metadata = {"image/png": {"width": width}}
    report.outputs[0].add_display(OutputKind.DISPLAY, {"data": data, "metadata": metadata})
    assert re.findall('<img src="[^"]*"[^>]* width="([^"]*)"', report_html(report, Look())) == (
        [shown] if shown else []
    )


def test_two_pictures_of_one_cell_do_not_share_their_tabs() -> None:
    figures = {r: [{"image/png": f"P{r}"}] for r in (0, 1)}
    names = [set(re.findall(r'name="(\w+)"', with_figures(figures))) for _ in range(2)]
    assert not names[0] & names[1]


@given(st.dictionaries(st.integers(0, 9), st.text("ab<&\n", max_size=6), min_size=1))
@settings(deadline=None)
def test_the_text_holds_every_line_of_every_rank(texts: dict[int, str]) -> None:
    lines = groups_text(fold(texts)).split("\n")
    shown = [line.removesuffix("  <- differs") for line in lines]
    for text in filter(None, texts.values()):
        first, *others = text.split("\n")
        assert any(re.fullmatch(rf"\[[^]]+\] *{re.escape(first)}", line) for line in shown)
        assert all(any(line.endswith(f" {other}") for line in shown) for other in others)


@given(st.lists(st.text("ab\n", max_size=4), max_size=12))
@settings(deadline=None)
def test_lines_are_whole_however_the_stream_is_cut(pieces: list[str]) -> None:
    cut = Lines()
    lines = [line for piece in pieces for line in cut.feed(0, piece)] + cut.rest(0)
    text = "".join(pieces)
    assert lines == (text.removesuffix("\n").split("\n") if text else [])


@given(st.lists(st.tuples(st.integers(0, 2), LINE, st.floats(0, 1)), max_size=20))
@settings(deadline=None)
def test_merging_keeps_every_line_and_the_order_of_each_rank(
    said: list[tuple[int, str, float]],
) -> None:
    merger, now, shown = Merger(range(3)), 0.0, []
    for rank, line, wait_s in said:
        merger.add(rank, line, now)
        shown += merger.due(now)
        now += wait_s
    shown += merger.due(now, at_end=True)
    for rank in range(3):
        assert [line for ranks, line in shown if rank in ranks] == [
            line for r, line, _ in said if r == rank
        ]


def test_a_line_waits_for_the_other_ranks_and_not_for_ever() -> None:
    merger = Merger([0, 1])
    merger.add(0, "a", 0.0)
    assert merger.due(0.1) == []
    merger.add(1, "a", 0.2)
    assert merger.due(0.2) == [((0, 1), "a")]
    merger.add(0, "b", 1.0)
    assert merger.due(1.0 + FOLD_WITHIN_S) == [((0,), "b")]


def test_the_tails_of_ranks_become_one_with_equal_lines_once() -> None:
    tails = {0: [(0.0, "a"), (0.0, "b")], 1: [(0.1, "a"), (0.1, "c")]}
    assert merge(tails) == [((0, 1), "a"), ((0,), "b"), ((1,), "c")]


def test_of_similar_bars_one_is_shown() -> None:
    bars = [(rank, f" {rank}0%|{'█' * rank}   | {rank}/9 [00:0{rank}<00:01]") for rank in range(8)]
    (shown,) = fold_bars(bars)
    assert shown.endswith("(ranks 1-7 alike)")


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("0%\r50%\r100%\n", "100%\n"),
        ("0%\r\n50%\r\n", "0%\n50%\n"),
        ("outer 1\n\rinner 1\x1b[A\router 2\n\rinner 2\x1b[A\n\n", "outer 2\ninner 2\n"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
        (f"a\nb\x1b[{'9' * 5000}A\rc", "c\nb"),
    ],
)
def test_text_is_as_a_terminal_leaves_it(printed: str, shown: str) -> None:
    assert as_shown(printed) == shown


@given(st.text("ab<&\x1b[0;31m5", max_size=20))
def test_colours_are_markup_and_the_rest_is_escaped(text: str) -> None:
    html = ansi.to_html(text)
    assert re.sub(r"<span style=\"[^\"<]*\">|</span>", "", html) == ansi.to_html(ansi.plain(text))
    assert not re.search(r"<(?!/?span)", html)


@pytest.mark.parametrize(
    ("cell", "quiet"),
    [("x", False), ("x;", True), ("x; # why", True), ("s = ';'", False), ("!ls ;'", False)],
)
def test_a_semicolon_at_the_end_hides_the_value(cell: str, quiet: bool) -> None:
    assert ends_quietly(cell) == quiet
