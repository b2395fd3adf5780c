"""What the ranks of a cell have said, as text and HTML. Pure functions; runs on the client.

Groups of ranks that said the same, the largest first; what failed comes before that. The text form
is for terminals and for readers without HTML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from gpupool.core.formatting import format_ranks, number
from gpupool.core.wire.output import OutputKind
from gpupool.notebook.cells.errors import errors_html
from gpupool.notebook.cells.figures import figures_html, figures_text, is_embeddable, is_rich
from gpupool.notebook.cells.heading import heading, heading_html
from gpupool.notebook.page import ansi, markup
from gpupool.pool.calls.output import RankOutput
from gpupool.pool.result import SpmdResult
from gpupool.spmd.cell import CellReport
from gpupool.spmd.output import Group, differences, fold, fold_lines, majority

HEAD_LINES, LAST_LINES = 200, 50  # of a group; the rest is in result.text(rank)
MAX_SHOWN_CHARS = 100_000  # of a group, however long its lines are
MAX_BY_LINE_CHARS = 1_000_000  # of all ranks together: longer texts are compared as a whole


@dataclass(frozen=True, slots=True)
class Look:
    """What of a cell is shown, and how.

    `name` is what the user can ask for the whole text. `alone`: there are no displays beside this
    one, so what cannot stand inside it (a widget) is there as its text.
    """

    show_values: bool = True
    show_texts: bool = True
    name: str = ""
    alone: bool = False


def report_html(report: CellReport, look: Look) -> str:
    """A finished cell: how it went, errors, and what the ranks have shown, in its order."""
    blocks = list[str]()
    figures = figures_html(_figures(report, look))
    for texts, figure in zip_longest(_texts(report, look), figures):
        blocks += groups_html(fold(texts, alike=True), look) if texts else []
        blocks += [figure] if figure else []
    values = groups_html(fold(_values(report, look), alike=True), look, _label(report))
    return markup.card(heading_html(report), *errors_html(report.error), *blocks, *values)


def report_text(report: CellReport, look: Look) -> str:
    """The same as text, errors last: they are what a reader of a log looks for."""
    parts = list[str]()
    figures = _nth(_figures(report, look))
    for texts, figure in zip_longest(_texts(report, look), figures):
        parts += [groups_text(fold(texts or {}, alike=True), look), figures_text(figure or {})]
    values = fold(_values(report, look), alike=True)
    # Below other lines it would be taken for one of them.
    is_label_needed = any(parts) and sum(bool(group.text) for group in values) > 1
    parts += [_label(report) if is_label_needed else "", groups_text(values, look)]
    errors = "\n".join(report.error.details()) if report.error else ""
    parts.append(ansi.plain(errors).strip("\n"))
    return "\n".join(part for part in parts if part) or heading(report)


def has_something(report: CellReport, look: Look) -> bool:
    """Whether the ranks have shown anything, or failed."""
    if report.error or any(_values(report, look).values()):
        return True
    texts, figures = _texts(report, look), _figures(report, look)
    return any(any(part.values()) for part in texts) or any(figures.values())


def result_html(result: SpmdResult, *, texts: bool = True) -> str:
    """A result that is displayed: as its cell showed it, or without what the ranks printed."""
    return report_html(_report_of(result), Look(alone=True, show_texts=texts))


def result_text(result: SpmdResult) -> str:
    """A result that is displayed, as text: its values, or that there are none."""
    return report_text(_report_of(result), Look(alone=True))


def values_text(result: SpmdResult) -> str:
    """The values of the ranks in lines, for the prompt of a terminal; else how the cell went."""
    texts = {}
    for rank, output in result.outputs.items():
        values = [bundle for bundle in output.displays if bundle["kind"] == OutputKind.RESULT]
        shown = values[-1]["data"].get("text/plain", "") if values else result.value_text(rank)
        texts[rank] = str(shown)
    return groups_text(fold(texts, alike=True)) or heading(_report_of(result))


def groups_text(groups: Sequence[Group], look: Look | None = None) -> str:
    """The groups as text: the ranks in front, the lines below each other.

    >>> print(groups_text([Group((0, 1, 2), "device cpu\\nrows 3"), Group((3,), "rows 2")]))
    [0-2] device cpu
          rows 3
    [3]   rows 2  <- differs
    """
    said = [group for group in groups if group.text]
    if not said:
        return ""
    most = majority(groups)
    by_line = _by_line(said, most)
    said = by_line or said
    marks = [f"[{format_ranks(group.ranks)}] " for group in said]
    # A long list of ranks would push all texts to the right, so nothing is aligned then.
    width = max(len(mark) for mark in marks) if max(map(len, marks)) < 24 else 0
    lines = []
    for mark, group in zip(marks, said, strict=True):
        text = _cut(group, look)
        different = differences(text, _cut(most, look)) if _can_differ(group, most) else set()
        alike = f"  (rank {group.ranks[0]}; times differ on the others)" if group.alike else ""
        for n, line in enumerate(text.split("\n")):
            first = (mark if n == 0 else " " * len(mark)).ljust(width)
            lines.append(first + line + ("  <- differs" if n in different else alike * (n == 0)))
    if by_line:  # each has but one line, and nothing has been cut
        shown, left_out = _middle(lines)
        lines = [
            *shown[:HEAD_LINES],
            *_note(left_out, len(lines), _name(look)),
            *shown[HEAD_LINES:],
        ]
    return "\n".join(lines)


def groups_html(groups: Sequence[Group], look: Look, what: str = "") -> list[str]:
    """The groups as blocks; amber is the odd one out, where more than half of the ranks agree.

    Args:
        what: names what the groups are: "Out[3]:" of values.
    """
    said = [group for group in groups if group.text]
    most = majority(groups)
    if len(said) > 1:
        lines = _by_line(said, most)
        if lines is None and not any("\n" in group.text for group in said):
            lines = said
        if lines is not None:
            label = markup.muted(what) if what else ""
            return [markup.bar(label + _rows(lines, most, look), markup.GREY)]
    return [_block(group, most, look, what, is_first=n == 0) for n, group in enumerate(said)]


# ---- inside ----------------------------------------------------------------------------------


def _by_line(said: Sequence[Group], most: Group | None) -> list[Group] | None:
    """The lines of ranks none of which is the odd one out, if they go together line by line."""
    is_short = sum(len(group.text) for group in said) <= MAX_BY_LINE_CHARS
    return fold_lines(said) if most is None and is_short else None


def _rows(groups: Sequence[Group], most: Group | None, look: Look) -> str:
    """One line for each group."""
    marks = [f"[{format_ranks(group.ranks)}]" for group in groups]
    # As in text: long lists of ranks are not aligned.
    width = max(map(len, marks)) if max(map(len, marks)) < 24 else 0
    rows = []
    for mark, group in zip(marks, groups, strict=True):
        text = _cut(group, look)
        different = differences(text, _cut(most, look)) if _can_differ(group, most) else set()
        note = markup.muted("  ← differs") if different else ""
        if group.alike:
            note = markup.muted(f"  ← {_apart(group)}")
        rows.append(f"<b>{mark}</b>{' ' * (width - len(mark))} {_line(text, different, 0)}{note}")
    return markup.code_html(_folding(rows, _name(look)))


def _block(group: Group, most: Group | None, look: Look, what: str, *, is_first: bool) -> str:
    text, different = _cut(group, look), set[int]()
    colour = markup.GREEN if group is most else markup.GREY
    title = f"<b>[{format_ranks(group.ranks)}]</b> {markup.muted(_title(group, look, what))}"
    if _can_differ(group, most):
        different = differences(text, _cut(most, look))
        assert most is not None
        words = _differing(different, text, _cut(most, look), most.ranks)
        title += markup.badge(words, markup.AMBER)
        colour = markup.AMBER
    rows, left_out = [_line(line, different, n) for n, line in enumerate(text.split("\n"))], False
    if len(rows) > HEAD_LINES + LAST_LINES and len(group.text) <= MAX_SHOWN_CHARS:
        # The note in the cut text makes room for the lines themselves.
        hidden = group.text.split("\n")[HEAD_LINES:-LAST_LINES]
        rows[HEAD_LINES : HEAD_LINES + 1] = [ansi.to_html(line) for line in hidden]
        left_out = True
    # The mock-up's rule: short things are open; a page of each of many groups is not.
    is_open = is_first or len(rows) <= 12
    inner = markup.code_html(_folding(rows) if left_out else "\n".join(rows))
    return markup.bar(markup.fold_out(title, inner, is_open=is_open), colour)


def _folding(rows: Sequence[str], name: str = "") -> str:
    """Rows of HTML, one below the other; the middle of many of them has to be opened.

    Of very many it is left out, and `name` is what can be asked for them.
    """
    shown, left_out = _middle(rows)
    if not left_out:
        return "\n".join(rows)
    if sum(map(len, left_out)) > 2 * MAX_SHOWN_CHARS:
        note = map(markup.muted, _note(left_out, len(rows), name))
        return "\n".join([*shown[:HEAD_LINES], *note, *shown[HEAD_LINES:]])
    title = markup.muted(f"… {number(len(left_out))} more lines")
    inner = markup.fold_out(title, "\n".join(left_out), is_open=False)
    return "\n".join(shown[:HEAD_LINES]) + inner + "\n".join(shown[HEAD_LINES:])


def _middle(rows: Sequence[str]) -> tuple[list[str], list[str]]:
    """The rows that are shown, the first and the last, and those between them."""
    if len(rows) <= HEAD_LINES + LAST_LINES + 1:  # a note would take the place of one
        return list(rows), []
    shown = [*rows[:HEAD_LINES], *rows[-LAST_LINES:]]
    return shown, list(rows[HEAD_LINES:-LAST_LINES])


def _note(left_out: Sequence[str], num_lines: int, name: str) -> list[str]:
    """The line that stands for those that are left out."""
    count = f"{number(len(left_out))} of {number(num_lines)}"
    return [f"[... {count} lines left out{name} ...]"] if left_out else []


def _title(group: Group, look: Look, what: str) -> str:
    num_lines = group.text.count("\n") + 1
    parts = []
    if group.alike:
        parts.append(_apart(group))
    elif len(group.ranks) > 1:
        parts.append(f"identical on {len(group.ranks)} ranks")
    if num_lines > 1:
        parts.append(f"{number(num_lines)} lines")
    if num_lines > HEAD_LINES + LAST_LINES + 1:
        parts.append(f"{HEAD_LINES + LAST_LINES} shown")
    return f"{what} {', '.join(parts)}".strip()


def _apart(group: Group) -> str:
    same = f"same on {len(group.ranks)} ranks apart from times, addresses and PIDs"
    return f"{same} (showing rank {group.ranks[0]})"


def _differing(different: set[int], text: str, reference: str, ranks: Sequence[int]) -> str:
    if different:
        lines = "1 line" if len(different) == 1 else f"{len(different)} lines"
        return f"differs from [{format_ranks(ranks)}] in {lines}"
    fewer = reference.count("\n") - text.count("\n")
    return "1 line fewer" if fewer == 1 else f"{fewer} lines fewer"


def _line(line: str, different: set[int], number: int) -> str:
    return markup.mark(ansi.plain(line)) if number in different else ansi.to_html(line)


def _can_differ(group: Group, most: Group | None) -> bool:
    return most is not None and bool(most.text) and group is not most


def _texts(report: CellReport, look: Look) -> list[dict[int, str]]:
    """What each rank printed before its first figure, then before its second, ..., and at last.

    What it displayed as mere text stands between what it printed, in its place.
    """
    if not look.show_texts:
        return []
    parts = [dict.fromkeys(report.outputs, "")]
    for rank, output in report.outputs.items():
        for n, text in enumerate(_texts_of(output, look)):
            if n == len(parts):
                parts.append(dict.fromkeys(report.outputs, ""))
            parts[n][rank] = text
    return parts


def _texts_of(output: RankOutput, look: Look) -> list[str]:
    """The texts of one rank, between its figures."""
    texts: list[list[str]] = [[]]
    for piece in output.pieces():
        if isinstance(piece, str):
            texts[-1].append(ansi.without_moves(piece).rstrip("\n"))
        elif _is_shown(piece, look):
            texts.append([])
        elif piece["kind"] == OutputKind.DISPLAY and not is_rich(piece):
            texts[-1].append(str(piece["data"].get("text/plain", "")))
    return ["\n".join(text for text in lines if text.strip()) for lines in texts]


def _label(report: CellReport) -> str:
    """What stands before the values of the last expression."""
    cell = report.cell_number
    return f"Out[{cell}]:" if cell else "Out:"


def _values(report: CellReport, look: Look) -> dict[int, str]:
    """The value of each rank's last expression, where text is all there is of it."""
    if not look.show_values:
        return {}
    values = {}
    for rank, output in report.outputs.items():
        bundles = [bundle for bundle in output.displays if bundle["kind"] == OutputKind.RESULT]
        if bundles:
            bundle = bundles[-1]
            # A rich value is among the figures; its text would say it twice.
            values[rank] = "" if is_rich(bundle) else str(bundle["data"].get("text/plain", ""))
        elif report.result is not None and not output.displays:  # of a function
            values[rank] = report.result.value_text(rank)
    return values


def _figures(report: CellReport, look: Look) -> dict[int, list[Mapping[str, object]]]:
    return {
        rank: [bundle for bundle in output.displays if _is_shown(bundle, look)]
        for rank, output in report.outputs.items()
    }


def _is_shown(bundle: Mapping[str, Any], look: Look) -> bool:
    """Whether it stands in the picture as a figure."""
    if not (is_embeddable(bundle) or (look.alone and is_rich(bundle))):
        return False
    return look.show_texts if bundle["kind"] == OutputKind.DISPLAY else look.show_values


def _nth(
    figures: Mapping[int, Sequence[Mapping[str, object]]],
) -> list[dict[int, list[Mapping[str, object]]]]:
    """The first figure of each rank, then the second of each, ..."""
    most = max(map(len, figures.values()), default=0)
    return [{r: [mine[n]] for r, mine in figures.items() if n < len(mine)} for n in range(most)]


def _report_of(result: SpmdResult) -> CellReport:
    return CellReport(
        result.outputs, result.elapsed_s, result=result, cell_number=result.cell_number
    )


def _name(look: Look | None, rank: str = "rank") -> str:
    return f": {look.name}.text({rank})" if look is not None and look.name else ""


def _cut(group: Group | None, look: Look | None) -> str:
    """The first and the last lines of a group, and what to ask for the others."""
    if group is None:
        return ""
    text = group.text
    lines = text.split("\n")
    name = _name(look, str(group.ranks[0]))
    shown, left_out = _middle(lines)
    if left_out:
        note = _note(left_out, len(lines), name)
        text = "\n".join([*shown[:HEAD_LINES], *note, *shown[HEAD_LINES:]])
    if len(text) > MAX_SHOWN_CHARS:
        # After the lines, as a single line may have megabytes.
        half = MAX_SHOWN_CHARS // 2
        note = [f"[... {number(len(text) - 2 * half)} characters left out{name} ...]"]
        text = "\n".join([text[:half], *note, text[-half:]])
    return text
