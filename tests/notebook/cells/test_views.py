"""How a cell's output is drawn, from plain data."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpupool.core.errors import RankError, SpmdError
from gpupool.core.wire.output import OutputKind
from gpupool.notebook.cells.lines import Lines, fold_bars
from gpupool.notebook.cells.picture import Look, groups_text, report_html, report_text
from gpupool.notebook.magics.magics import ends_quietly
from gpupool.notebook.page import markup
from gpupool.pool.calls.output import RankOutput
from gpupool.spmd.cell import CellReport
from gpupool.spmd.output import fold

LINE = st.text("ab", max_size=3)


def report_of(texts: dict[int, str], *errors: RankError) -> CellReport:
    outputs = {rank: RankOutput() for rank in texts}
    for rank, text in texts.items():
        outputs[rank].add(OutputKind.STDOUT, text)
    error = SpmdError({e.rank: e for e in errors}, len(texts)) if errors else None
    return CellReport(outputs, 0.5, error=error)


def html_of(texts: dict[int, str], *errors: RankError) -> str:
    return report_html(report_of(texts, *errors), Look())


def marked(html: str) -> list[str]:
    return re.findall(r"<mark [^>]*>([^<]*)</mark>", html)


def test_lines_that_differ_from_the_majority_are_marked() -> None:
    html = html_of({0: "head\nrows 8", 1: "head\nrows 7", 2: "head\nrows 8"})
    assert marked(html) == ["rows 7"]
    assert "differs from [0, 2]" in html
    assert html.index("[0, 2]") < html.index("identical on 2 ranks") < html.index("<b>[1]</b>")


def test_ranks_that_all_differ_are_folded_line_by_line_in_grey() -> None:
    texts = {rank: f"rank {rank} of 4\nready" for rank in range(4)}
    html = html_of(texts)
    rows = [f"<b>[{rank}]  </b> rank {rank} of 4" for rank in range(4)]
    assert "\n".join([*rows, "<b>[0-3]</b> ready</pre>"]) in html
    assert "differs" not in html
    assert markup.AMBER not in html
    said = report_text(report_of(texts), Look())
    assert said.splitlines()[-1] == "[0-3] ready"
    assert "differs" not in said


def test_ranks_that_differ_in_addresses_and_times_alone_are_one_group_with_a_note() -> None:
    texts = {r: f"<A at 0x7f{r}1234> took 1.0{r} s, pid {r}77\nend" for r in range(3)}
    for shown in (html_of(texts), report_text(report_of(texts), Look())):
        assert shown.count("equal apart from times, addresses and PIDs") == 1
        assert "0x7f01234" in shown  # the real text


def test_a_long_output_is_cut_in_the_middle_and_names_what_has_it_all() -> None:
    lines = "\n".join(map(str, range(1000)))
    for draw in (report_text, report_html):
        shown = draw(report_of({0: lines, 1: lines}), Look(name="res"))
        assert "[... 750 of 1,000 lines left out: res.text(0) ...]" in shown
        assert [bool(re.search(rf"\b{n}\b", shown)) for n in (199, 200, 949, 950)] == [1, 0, 0, 1]
        shown = draw(report_of({0: "x" * 300_000}), Look(name="_"))
        assert "[... 200,000 characters left out: _.text(0) ...]" in shown


def test_text_and_figures_stay_in_their_order() -> None:
    report = report_of({0: "", 1: ""})
    for rank, output in report.outputs.items():
        output.add(OutputKind.STDOUT, "before\n")
        output.add(OutputKind.DISPLAY, {"data": {"text/html": "<i>table</i>"}})
        output.add(OutputKind.STDOUT, f"between {rank}\n")
        output.add(OutputKind.DISPLAY, {"data": {"text/plain": "mere text"}})
        output.add(OutputKind.STDOUT, "and after\n")
        output.add(OutputKind.DISPLAY, {"data": {"image/png": f"P{rank}"}})
        output.add(OutputKind.STDOUT, "at last\n")
        output.add(OutputKind.RESULT, {"data": {"text/plain": f"{rank}0"}})
    html = report_html(replace(report, cell_number=7), Look())
    words = ["before", "<i>table", "between 0", "between 1", "mere text", "and after"]
    words += ["base64,P0", "base64,P1", "at last", "Out[7]:", "</b> 00", "</b> 10"]
    places = [html.index(word) for word in words]
    assert places == sorted(places)
    assert html.count("and after") == 1
    text = report_text(replace(report, cell_number=7), Look())
    assert text.splitlines()[-3:] == ["Out[7]:", "[0] 00", "[1] 10"]


def test_an_interrupt_by_the_user_is_one_amber_line_for_each_place() -> None:
    trace = "Cell In[3], line 5\n      4 if rank == 1:\n----> 5     time.sleep(60)"
    was = "in barrier (Cell In[3], line 3)"
    html = html_of(
        dict.fromkeys(range(4), ""),
        RankError(1, "KeyboardInterrupt", "", trace, where="Cell In[3], line 5", by_user=True),
        *(RankError(r, "RuntimeError", "gone", freed=True, was=was) for r in (0, 2, 3)),
    )
    assert "interrupted by you: rank 1 at line 5<br>ranks 0, 2, 3 in barrier" in html
    assert "4 interrupted" in html
    assert markup.RED not in html
    assert "failed" not in html


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
    assert "waiting in all_reduce" in others
    assert "same traceback on 3 ranks, folded" in others


@pytest.mark.parametrize(
    ("width", "shown"),
    [(300, "300"), ("50%", "50%"), ('1" onload="x', None), ({}, None)],
)
def test_a_figure_has_the_size_that_was_asked_for(width: object, shown: str | None) -> None:
    report = report_of({0: ""})
    data = {"image/png": "AAAA", "text/plain": "<Figure>"}
    metadata = {"image/png": {"width": width}}
    report.outputs[0].add(OutputKind.DISPLAY, {"data": data, "metadata": metadata})
    assert re.findall('<img src="[^"]*"[^>]* width="([^"]*)"', report_html(report, Look())) == (
        [shown] if shown else []
    )


@given(st.dictionaries(st.integers(0, 9), st.text("ab<&\n", max_size=6), min_size=1))
@settings(deadline=None)
def test_the_text_holds_every_line_of_every_rank(texts: dict[int, str]) -> None:
    lines = groups_text(fold(texts)).split("\n")
    shown = [line.removesuffix("  <- differs") for line in lines]
    for text in filter(None, texts.values()):
        first, *others = text.split("\n")
        assert any(re.fullmatch(rf"\[[^]]+\] *{re.escape(first)}", line) for line in shown)
        assert all(any(line.endswith(f" {other}") for line in shown) for other in others)


def taken(lines: Lines) -> list[str]:
    return [line for _, line in lines.due(0.0, at_end=True)]


@pytest.mark.parametrize("in_pieces", [True, False])
def test_bars_below_each_other_are_unfinished_lines_until_they_are_over(in_pieces: bool) -> None:
    lines = Lines([0])

    def said(*pieces: str) -> list[str]:
        for piece in pieces if in_pieces else ("".join(pieces),):
            lines.feed(0, piece, 0.0)
        return taken(lines)

    assert said("begin\n") == ["begin"]
    assert said("\router 0", "\n", "\rinner 0", "\x1b[", "A", "\n", "\rinner 1\x1b", "[A") == []
    assert lines.bars() == ["[0] outer 0", "[0] inner 1"]
    assert said("\router 1", "\n", "\r       ", "\x1b[A", "\router 2", "\n", "end\n") == [
        "outer 2",
        "end",
    ]
    assert said("\rnext 0", "\rnext 1", "\n", "\rlast 0") == []
    assert said("\rlast 1", "open") == ["next 1"]
    lines.end(0, 0.0, "a display")
    assert taken(lines) == ["last 1open", "a display"]


@given(st.lists(st.text("ab\n", max_size=4), max_size=12))
@settings(deadline=None)
def test_lines_are_whole_however_the_stream_is_cut(pieces: list[str]) -> None:
    lines, text = Lines([0]), "".join(pieces)
    for piece in pieces:
        lines.feed(0, piece, 0.0)
    lines.end(0, 0.0)
    assert taken(lines) == (text.removesuffix("\n").split("\n") if text else [])


@given(st.lists(st.tuples(st.integers(0, 2), LINE, st.floats(0, 1)), max_size=20))
@settings(deadline=None)
def test_merging_keeps_every_line_and_the_order_of_each_rank(
    said: list[tuple[int, str, float]],
) -> None:
    lines, now, shown = Lines(range(3)), 0.0, []
    for rank, line, wait_s in said:
        lines.feed(rank, f"{line}\n", now)
        shown += lines.due(now)
        now += wait_s
    shown += lines.due(now, at_end=True)
    for rank in range(3):
        assert [line for ranks, line in shown if rank in ranks] == [
            line for r, line, _ in said if r == rank
        ]


def test_equal_lines_are_one_below_lines_that_differ() -> None:
    lines = Lines([0, 1], max_chars=6)
    for rank in (0, 1):
        lines.feed(rank, f"rank {rank} of 2\nsame\nunfinished", 0.0)
    expected = [((0,), "rank 0"), ((1,), "rank 1"), ((0, 1), "same")]
    assert [lines.tail(9), lines.tail(2)] == [expected, expected[1:]]  # they stay
    assert lines.bars() == ["[0, 1] unfini"]


def test_of_bars_the_range_is_shown() -> None:
    counts = [(0, "12it [00:01,  9.80it/s]"), (1, "14it [00:01,  9.90it/s]")]
    assert fold_bars(counts) == ["[0, 1] 12-14 it"]
    same = [(0, "9%| | 9/99 [00:01, 2.0it/s]"), (1, "9%| | 9/99 [00:01, 1.0it/s]")]
    assert fold_bars(same) == ["[0, 1] 9 %"]
    assert fold_bars([(0, "step 1"), (1, "step 2"), (2, "step 2")]) == [
        "[0] step 1",
        "[1, 2] step 2",
    ]


@pytest.mark.parametrize(
    ("cell", "quiet"),
    [("x", False), ("x;", True), ("x; # why", True), ("s = ';'", False), ("!ls ;'", False)],
)
def test_a_semicolon_at_the_end_hides_the_value(cell: str, quiet: bool) -> None:
    assert ends_quietly(cell) == quiet
