"""What the ranks of a cell have said, as text and HTML. Pure functions; runs on the client.

Groups of ranks that said the same, the largest first; what failed comes before that. The text form
is for terminals and for readers without HTML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpupool.core.wire.output import OutputKind
from gpupool.notebook.cells.errors import errors_html
from gpupool.notebook.cells.figures import figures_html, figures_text, is_embeddable, is_rich
from gpupool.notebook.cells.heading import heading, heading_html
from gpupool.notebook.page import ansi, markup
from gpupool.pool.calls.output import RankOutput
from gpupool.pool.result import SpmdResult
from gpupool.spmd.cell import CellReport
from gpupool.spmd.output import Group, differences, fold_alike, format_ranks, majority

HEAD_LINES, LAST_LINES = 200, 50  # of a group; the rest is in result.text(rank)
MAX_SHOWN_CHARS = 100_000  # of a group, however long its lines are


@dataclass(frozen=True, slots=True)
class Look:
    """What of a cell is shown, and how.

    `name` is what the user can ask for the whole text. `alone`: there are no displays beside this
    one, so what cannot stand inside it (a widget) is there as its text.
    """

    fold_equal: bool = True
    show_values: bool = True
    show_texts: bool = True
    name: str = ""
    alone: bool = False


def report_html(report: CellReport, look: Look) -> str:
    """A finished cell: how it went, errors, texts, values and figures of the ranks."""
    figures = _figures(report, look)
    return markup.card(
        heading_html(report),
        *errors_html(report.error),
        *groups_html(_fold(_texts(report, look), look), look),
        *groups_html(_fold(_values(report, look), look), look, "value"),
        *figures_html(figures, fold_equal=look.fold_equal),
    )


def report_text(report: CellReport, look: Look) -> str:
    """The same as text, errors last: they are what a reader of a log looks for."""
    errors = "\n".join(report.error.details()) if report.error else ""
    parts = [said_text(report, look), ansi.plain(errors).strip("\n")]
    return "\n".join(part for part in parts if part) or heading(report)


def said_text(report: CellReport, look: Look) -> str:
    """What the ranks have said, without their errors; "" if that is nothing."""
    parts = [
        groups_text(_fold(_texts(report, look), look), look),
        groups_text(_fold(_values(report, look), look), look),
        figures_text(_figures(report, look)),
    ]
    return "\n".join(part for part in parts if part)


def has_something(report: CellReport, look: Look) -> bool:
    """Whether the ranks have shown anything, or failed."""
    said = [*_texts(report, look).values(), *_values(report, look).values()]
    return bool(report.error or any(said) or any(_figures(report, look).values()))


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
    return groups_text(fold_alike(texts)) or heading(_report_of(result))


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
    marks = [f"[{format_ranks(group.ranks)}] " for group in said]
    # A long list of ranks would push all texts to the right, so nothing is aligned then.
    width = max(len(mark) for mark in marks) if max(map(len, marks)) < 24 else 0
    most, lines = majority(groups), []
    for mark, group in zip(marks, said, strict=True):
        text = _cut(group, look)
        different = differences(text, _cut(most, look)) if _can_differ(group, most) else {}
        for n, line in enumerate(text.split("\n")):
            first = (mark if n == 0 else " " * len(mark)).ljust(width)
            lines.append(first + line + ("  <- differs" if n in different else ""))
    return "\n".join(lines)


def groups_html(groups: Sequence[Group], look: Look, what: str = "") -> list[str]:
    """The groups as blocks; where most ranks agree, what differs from them is marked."""
    said = [group for group in groups if group.text]
    most = majority(groups)
    if len(said) > 1 and not any("\n" in group.text for group in said):
        return [markup.bar(markup.code_html(_compact(said, most, look)), markup.GREY)]
    # Without a majority nobody is right: marks help only if the texts are much the same.
    if most is None and len(said) > 1 and _are_related(said, look):
        most = said[0]
    return [_block(group, most, look, what, is_first=n == 0) for n, group in enumerate(said)]


# ---- inside ----------------------------------------------------------------------------------


def _compact(said: Sequence[Group], most: Group | None, look: Look) -> str:
    """One line for each group."""
    marks = [f"[{format_ranks(group.ranks)}]" for group in said]
    width = max(map(len, marks))
    lines = []
    for mark, group in zip(marks, said, strict=True):
        text = _cut(group, look)
        spans = differences(text, _cut(most, look)) if _can_differ(group, most) else {}
        note = markup.muted("  ← differs") if spans else ""
        lines.append(f"<b>{mark}</b>{' ' * (width - len(mark))} {_line(text, spans, 0)}{note}")
    return "\n".join(lines)


def _block(group: Group, most: Group | None, look: Look, what: str, *, is_first: bool) -> str:
    text, spans = _cut(group, look), {}
    colour = markup.GREEN if group is most or most is None else markup.GREY
    title = f"<b>[{format_ranks(group.ranks)}]</b> {markup.muted(_title(group, text, what))}"
    if _can_differ(group, most):
        spans = differences(text, _cut(most, look))
        assert most is not None
        title += markup.badge(_differing(spans, text, _cut(most, look), most.ranks), markup.AMBER)
        colour = markup.AMBER
    lines = [_line(line, spans, n) for n, line in enumerate(text.split("\n"))]
    # The mock-up's rule: short things are open; a page of each of many groups is not.
    is_open = is_first or len(lines) <= 12
    return markup.bar(
        markup.fold_out(title, markup.code_html("\n".join(lines)), is_open=is_open), colour
    )


def _are_related(said: Sequence[Group], look: Look) -> bool:
    """Whether the groups have more lines in common with the first than they differ in."""
    first = _cut(said[0], look)
    return all(
        2 * len(differences(text, first)) <= text.count("\n") + 1
        for text in (_cut(group, look) for group in said[1:])
    )


def _title(group: Group, text: str, what: str) -> str:
    num_lines = text.count("\n") + 1
    parts = [what] if what else []
    if group.alike:
        parts.append(
            f"alike on {len(group.ranks)} ranks: only times, addresses or process ids differ "
            f"(shown: rank {group.ranks[0]})"
        )
    elif len(group.ranks) > 1:
        parts.append(f"identical on {len(group.ranks)} ranks")
    if num_lines > 1:
        parts.append(f"{num_lines} lines")
    return ", ".join(parts)


def _differing(spans: Mapping[int, object], text: str, reference: str, ranks: Sequence[int]) -> str:
    if spans:
        lines = "1 line" if len(spans) == 1 else f"{len(spans)} lines"
        return f"differs from [{format_ranks(ranks)}] in {lines}"
    fewer = reference.count("\n") - text.count("\n")
    return "lacks 1 line" if fewer == 1 else f"lacks {fewer} lines"


def _line(line: str, spans: Mapping[int, list[tuple[int, int]]], number: int) -> str:
    if number in spans:
        return markup.mark_words(ansi.plain(line), spans[number])
    return ansi.to_html(line)


def _can_differ(group: Group, most: Group | None) -> bool:
    return most is not None and bool(most.text) and group is not most


def _fold(texts: Mapping[int, str], look: Look) -> list[Group]:
    if look.fold_equal:
        return fold_alike(texts)
    return [Group((rank,), text) for rank, text in texts.items()]


def _texts(report: CellReport, look: Look) -> dict[int, str]:
    """What each rank printed, and after it what it displayed as mere text."""
    if not look.show_texts:
        return {}
    return {rank: _text(output) for rank, output in report.outputs.items()}


def _text(output: RankOutput) -> str:
    shown = [
        str(bundle["data"].get("text/plain", ""))
        for bundle in output.displays
        if bundle["kind"] == OutputKind.DISPLAY and not is_rich(bundle)
    ]
    printed = ansi.without_moves(output.text).rstrip("\n")
    return "\n".join(text for text in [printed, *shown] if text.strip())


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
        rank: [
            bundle
            for bundle in output.displays
            if (is_embeddable(bundle) or (look.alone and is_rich(bundle)))
            and (look.show_texts if bundle["kind"] == OutputKind.DISPLAY else look.show_values)
        ]
        for rank, output in report.outputs.items()
    }


def _report_of(result: SpmdResult) -> CellReport:
    return CellReport(result.outputs, result.elapsed_s, result=result)


def _cut(group: Group | None, look: Look | None) -> str:
    """The first and the last lines of a group, and what to ask for the others."""
    if group is None:
        return ""
    text = group.text
    lines = text.split("\n")
    left_out = len(lines) - HEAD_LINES - LAST_LINES
    name = f": {look.name}.text({group.ranks[0]})" if look is not None and look.name else ""
    if left_out > 0:
        note = f"[... {left_out} lines left out{name} ...]"
        lines = [*lines[:HEAD_LINES], note, *lines[-LAST_LINES:]]
        text = "\n".join(lines)
    if len(text) > MAX_SHOWN_CHARS:
        # After the lines, as a single line may have megabytes.
        half = MAX_SHOWN_CHARS // 2
        note = f"[... {len(text) - 2 * half} characters left out{name} ...]"
        text = f"{text[:half]}\n{note}\n{text[-half:]}"
    return text
