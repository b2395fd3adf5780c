"""What the ranks of a cell have said, as text and HTML. Pure functions; runs on the client."""

from __future__ import annotations

from html import escape

from gpupool.notebook import markup
from gpupool.notebook.words import duration
from gpupool.pool.result import SpmdResult
from gpupool.spmd.cell import CellReport
from gpupool.spmd.output import Group, different_lines, fold, format_ranks, majority

HEAD_LINES, LAST_LINES = 200, 50  # of a group; the rest is in result.text(rank)


def groups_text(groups: list[Group]) -> str:
    """The groups as text: the ranks in front, the lines below each other.

    >>> print(groups_text([Group((0, 1), "device cpu\\nrows 3"), Group((2,), "rows 2")]))
    [0, 1] device cpu
           rows 3
    [2] rows 2
    """
    blocks = []
    for group in groups:
        if group.text:
            mark = f"[{format_ranks(group.ranks)}] "
            blocks.append(mark + _cut(group.text).replace("\n", "\n" + " " * len(mark)))
    return "\n".join(blocks)


def groups_html(groups: list[Group], report: CellReport) -> str:
    """The groups under a line on how the cell went; equal ranks once.

    Where most ranks agree, the lines in which others differ from them are marked.
    """
    most, said = majority(groups), [group for group in groups if group.text]
    if most is None and len(said) > 1 and not any("\n" in group.text for group in said):
        blocks = [markup.bar(markup.code(groups_text(said)), markup.GREY)]
    else:
        blocks = [_block(group, most) for group in said]
    return markup.card(_head(report), *blocks)


def result_text(result: SpmdResult) -> str:
    """The values per rank, equal ones once."""
    return groups_text(fold({rank: result.value_text(rank) or "None" for rank in result.ranks}))


def _head(report: CellReport) -> str:
    num_ranks = len(report.outputs)
    errors = report.error.errors.values() if report.error else ()
    freed = sum(error.freed for error in errors)
    interrupted = sum(error.ename == "KeyboardInterrupt" and not error.freed for error in errors)
    counts = [
        (num_ranks - len(errors), "✓ {} ok", markup.GREEN),
        (len(errors) - freed - interrupted, "✗ {} failed", markup.RED),
        (interrupted, "{} interrupted", markup.AMBER),
        (freed, "{} freed from waiting", markup.AMBER),
    ]
    badges = [markup.badge(text.format(n), colour) for n, text, colour in counts if n]
    name = f"<b>{num_ranks} rank{'s' if num_ranks > 1 else ''}</b>"
    return name + "".join(badges) + markup.muted(_times(report))


def _block(group: Group, most: Group | None) -> str:
    title, text, marked = f"<b>[{format_ranks(group.ranks)}]</b> ", _cut(group.text), set()
    if len(group.ranks) > 1:
        title += markup.muted(f"identical on {len(group.ranks)} ranks")
    colour = markup.GREEN if group is most else markup.GREY
    if most is not None and most.text and group is not most:
        marked = set(different_lines(text, _cut(most.text)))
        colour = markup.AMBER
    if marked:
        lines = "1 line" if len(marked) == 1 else f"{len(marked)} lines"
        title += markup.badge(f"differs in {lines}", markup.AMBER)
    inner = f"<details open><summary>{title}</summary>{_code(text, marked)}</details>"
    return markup.bar(inner, colour)


def _code(text: str, marked: set[int]) -> str:
    lines = [
        markup.highlight(line) if number in marked else escape(line)
        for number, line in enumerate(text.split("\n"))
    ]
    return markup.code_html("\n".join(lines))


def _times(report: CellReport) -> str:
    result = report.result
    if result is None or len(result) < 2:
        return _shown_time(report.elapsed_s)
    by_rank = {rank: result.rank_elapsed_s(rank) for rank in result.ranks}
    slowest, fastest = max(by_rank, key=by_rank.__getitem__), min(by_rank.values())
    if by_rank[slowest] - fastest < 0.1:
        return _shown_time(report.elapsed_s)
    return (
        f"{_shown_time(report.elapsed_s)} (slowest rank {slowest}: "
        f"{_shown_time(by_rank[slowest])}, fastest {_shown_time(fastest)})"
    )


def _shown_time(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 0.95 else duration(seconds)


def _cut(text: str) -> str:
    lines = text.split("\n")
    left_out = len(lines) - HEAD_LINES - LAST_LINES
    if left_out <= 0:
        return text
    note = f"[... {left_out} lines left out; -o NAME keeps all, NAME.text(rank) ...]"
    return "\n".join([*lines[:HEAD_LINES], note, *lines[-LAST_LINES:]])
