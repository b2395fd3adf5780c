"""What the ranks of a cell have said and shown, as text and HTML. Pure; runs on the client.

Groups of ranks that said the same, the largest first; what failed comes before that. The text form
is for terminals and for readers without HTML.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple
from urllib.parse import quote

from gpupool.core.errors import RankError, SpmdError
from gpupool.core.formatting import duration, format_ranks, number, rank_count
from gpupool.core.wire.output import OutputKind
from gpupool.notebook.page import ansi, markup
from gpupool.pool.calls.output import SpmdResult
from gpupool.spmd.cell import CellReport
from gpupool.spmd.output import (
    Group,
    differences,
    fold,
    fold_displays,
    fold_lines,
    majority,
    normal,
)

HEAD_LINES, LAST_LINES = 200, 50  # of a group; the rest is in result.text(rank)
MAX_SHOWN_CHARS = 100_000  # of a group, however long its lines are
MAX_FIGURE_CHARS = 24_000_000  # of all figures of a cell together
_TOO_MANY = markup.muted("[... figures left out: too many ...]")
OPEN_LINES = 12  # so few are open, also where they are not the first
_DOTS = {"running": ("●", "#0072bd"), "done": ("✓", markup.GREEN)}

_SIZE = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?%?")  # what `Image(width=...)` takes: 200, "50%"
_SVG = "image/svg+xml"
_IMAGES = ("image/png", "image/jpeg", "image/gif", _SVG)

Bundle = Mapping[str, Any]
Section = tuple[dict[int, str], dict[int, Bundle]]  # by rank: a text, then a figure


@dataclass(frozen=True, slots=True)
class Look:
    """What of a cell is shown; `name` is what the user can ask for the whole text."""

    show_values: bool = True
    show_texts: bool = True
    name: str = ""

    def shows(self, bundle: Bundle) -> bool:
        is_wanted = self.show_texts if bundle["kind"] == OutputKind.DISPLAY else self.show_values
        return is_wanted and is_embeddable(bundle)


def report_html(report: CellReport, look: Look) -> str:
    """A finished cell: how it went, errors, and what the ranks have shown, in its order."""
    blocks = [heading_html(report), *errors_html(report.error)]
    num_chars, (sections, values) = 0, _parts(report, look)
    for texts, figures in sections:
        figure = figures_html(figures)
        num_chars += len(figure)
        figure = figure if num_chars <= MAX_FIGURE_CHARS else _TOO_MANY
        blocks += [*groups_html(fold(texts, alike=True), look.name), figure]
    if shown := groups_html(fold(values, alike=True), look.name):
        blocks += [markup.muted(_label(report)), *shown]
    return markup.card(*blocks)


def report_text(report: CellReport, look: Look) -> str:
    """The same as text, errors last: they are what a reader of a log looks for; "" of nothing."""
    sections, values = _parts(report, look)
    parts = list[str]()
    for texts, figures in sections:
        parts += [groups_text(fold(texts, alike=True), look.name), figures_text(figures)]
    shown = groups_text(fold(values, alike=True), look.name)
    # Below other lines values of several ranks would be taken for some of them.
    parts += [_label(report) if any(parts) and "\n[" in shown else "", shown]
    errors = "\n".join(report.error.details()) if report.error else ""
    return "\n".join(part for part in [*parts, ansi.plain(errors).strip("\n")] if part)


def result_html(result: SpmdResult, *, texts: bool = True) -> str:
    """A result that is displayed: as its cell showed it, or without what the ranks printed."""
    return report_html(_report_of(result), Look(show_texts=texts))


def result_text(result: SpmdResult, *, texts: bool = True) -> str:
    """The same as text; else how the cell went."""
    report = _report_of(result)
    return report_text(report, Look(show_texts=texts)) or heading(report)


def groups_text(groups: Sequence[Group], name: str = "") -> str:
    """The groups as text: the ranks in front, the lines below each other.

    >>> print(groups_text([Group((0, 1, 2), "device cpu\\nrows 3"), Group((3,), "rows 2")]))
    [0-2] device cpu
          rows 3
    [3]   rows 2  <- differs
    """
    lines = []
    for said in _said(groups, name):
        # Of a rank that only has fewer lines than the others none differs.
        remark = f"  <- {said.remark}" if said.remark and not said.different else ""
        for n, line in enumerate(said.lines):
            mark = said.mark if n == 0 else " " * len(said.mark)
            end = "  <- differs" if n in said.different else remark * (n == 0)
            lines.append(f"{mark} {line}{end}")
    return "\n".join(lines)


def groups_html(groups: Sequence[Group], name: str = "") -> list[str]:
    """The groups as blocks; amber is the odd one out, where more than half of the ranks agree."""
    said = _said(groups, name)
    if len(said) > 1 and all(len(one.lines) == 1 for one in said):
        return [markup.bar(markup.code_html("\n".join(map(_row, said))), markup.GREY)]
    return [_block(one, is_first=one is said[0]) for one in said]


# ---- groups ----------------------------------------------------------------------------------


class _Said(NamedTuple):
    """A group as it is drawn: its lines, cut; `different` are numbers of those most have not."""

    group: Group
    mark: str  # its ranks, as wide as the marks of the others
    remark: str
    lines: list[str]
    different: set[int]
    colour: str


def _said(groups: Sequence[Group], name: str) -> list[_Said]:
    most, said = majority(groups), [group for group in groups if group.text]
    num_lines = sum(group.text.count("\n") + 1 for group in said)
    # Where none is the odd one out they may go together line by line.
    if most is None and num_lines <= HEAD_LINES + LAST_LINES:
        said = fold_lines(said) or said
    width = max((len(format_ranks(group.ranks)) for group in said), default=0)
    drawn = []
    for group in said:
        text, different = _cut(group, name), set[int]()
        colour = markup.GREEN if group is most else markup.GREY
        remark = "equal apart from times, addresses and PIDs" if group.alike else ""
        if most is not None and most.text and group is not most:
            different, colour = differences(text, _cut(most, name)), markup.AMBER
            remark = f"differs from [{format_ranks(most.ranks)}]"
        mark = f"[{format_ranks(group.ranks)}]".ljust(width + 2)
        drawn.append(_Said(group, mark, remark, text.split("\n"), different, colour))
    return drawn


def _row(said: _Said) -> str:
    remark = markup.muted(f"  ← {said.remark}") if said.remark else ""
    return f"<b>{said.mark}</b> {_lines_html(said)}{remark}"


def _block(said: _Said, *, is_first: bool) -> str:
    num_ranks, num_lines = len(said.group.ranks), said.group.text.count("\n") + 1
    same = f"identical on {num_ranks} ranks" if num_ranks > 1 and not said.remark else ""
    length = f"{number(num_lines)} lines" if num_lines > 1 else ""
    notes = markup.muted(", ".join(filter(None, (same, length))))
    remark = markup.badge(said.remark, said.colour) if said.remark else ""
    title = f"<b>{said.mark.rstrip()}</b> {notes}{remark}"
    inner = markup.code_html(_lines_html(said))
    is_short = len(said.lines) <= OPEN_LINES
    return markup.bar(markup.fold_out(title, inner, is_open=is_first or is_short), said.colour)


def _lines_html(said: _Said) -> str:
    return "\n".join(
        markup.mark(ansi.plain(line)) if n in said.different else ansi.to_html(line)
        for n, line in enumerate(said.lines)
    )


def _cut(group: Group, name: str) -> str:
    asked = f": {name}.text({group.ranks[0]})" if name else ""
    text, lines = group.text, group.text.split("\n")
    num_left_out = len(lines) - HEAD_LINES - LAST_LINES
    if num_left_out > 1:  # a note would take the place of one
        count = f"{number(num_left_out)} of {number(len(lines))}"
        note = f"[... {count} lines left out{asked} ...]"
        text = "\n".join([*lines[:HEAD_LINES], note, *lines[-LAST_LINES:]])
    if len(text) > MAX_SHOWN_CHARS:  # after the lines, as a single one may have megabytes
        half = MAX_SHOWN_CHARS // 2
        note = f"[... {number(len(text) - 2 * half)} characters left out{asked} ...]"
        text = "\n".join([text[:half], note, text[-half:]])
    return text


# ---- figures and tables ----------------------------------------------------------------------


def is_rich(bundle: Bundle) -> bool:
    return bool(set(bundle["data"]) - {"text/plain"})


def is_embeddable(bundle: Bundle) -> bool:
    """Whether it can stand inside our HTML; others (widgets, plots of a library's own) cannot."""
    data = bundle["data"]
    known = any(mime in data for mime in ("text/html", *_IMAGES))
    # Widgets and plotly have HTML as well, but only as a fallback: their own type shows more.
    own = any(mime.startswith("application/") and mime != "application/pdf" for mime in data)
    return known and not own


def figures_html(figures: Mapping[int, Bundle]) -> str:
    """Figures of ranks as a block; equal ones are there once, of others the first is open."""
    folded = fold_displays({rank: [bundle] for rank, bundle in figures.items()})
    if not folded:
        return ""
    inner = bundle_html(folded[0][1])
    note = f"identical on {len(figures)} ranks" if len(figures) > 1 else ""
    if len(folded) > 1:
        note = f"{len(folded)} that differ"
        inner = "".join(
            markup.fold_out(f"<b>[{format_ranks(ranks)}]</b>", bundle_html(one), is_open=n == 0)
            for n, (ranks, one) in enumerate(folded)
        )
    title = f"<b>[{format_ranks(figures)}]</b> {markup.muted(note)}"
    return markup.bar(markup.fold_out(title, inner, is_open=True), markup.GREY)


def figures_text(figures: Mapping[int, Bundle]) -> str:
    folded = fold_displays({rank: [bundle] for rank, bundle in figures.items()})
    return "\n".join(
        f"[{format_ranks(ranks)}] {bundle['data'].get('text/plain', '(a figure)')}"
        for ranks, bundle in folded
    )


def bundle_html(bundle: Bundle) -> str:
    data = bundle["data"]
    if "text/html" in data:
        return str(data["text/html"])
    for mime in _IMAGES:
        if mime in data:
            # base64 may come in several lines; in a data URL it is one.
            octets = escape("".join(str(data[mime]).split()))
            # An image, not inline: JupyterLab takes SVG out of notebooks that are not trusted.
            source = f"utf8,{quote(str(data[mime]))}" if mime == _SVG else f"base64,{octets}"
            return _image(f"data:{mime};{source}", bundle, mime)
    return markup.code(str(data.get("text/plain", "")))


def _image(source: str, bundle: Bundle, mime: str) -> str:
    alt = ansi.plain(str(bundle["data"].get("text/plain", "figure"))).strip("<>")
    known = (bundle.get("metadata") or {}).get(mime) or {}
    known = known if isinstance(known, Mapping) else {}
    sizes = {key: str(known.get(key, "")) for key in ("width", "height")}
    # Matched, as it comes from a rank and goes into an attribute of the page.
    size = "".join(f' {key}="{n}"' for key, n in sizes.items() if _SIZE.fullmatch(n))
    style = "max-width:100%;height:auto"
    return f'<img src="{source}" alt="{escape(alt)}"{size} style="{style}">'


# ---- what they raised ------------------------------------------------------------------------


def errors_html(error: SpmdError | None) -> list[str]:
    """The rank that failed first, open; the others folded by equal traceback."""
    if error is None:
        return []
    if error.by_user:  # nothing has failed, so there is nothing to look into
        words = escape(error.interrupted_text()).replace("; ", "<br>")
        return [markup.bar(words, markup.AMBER)]
    groups: dict[tuple[object, str], list[RankError]] = {}
    first = error.first
    # A dict keeps this order, so the cause comes first and those who only waited come last.
    for one in sorted(error.errors.values(), key=lambda e: (e is not first, e.freed, e.rank)):
        # of those that were freed each names the port or peer that it lost
        text = one.freed_from if one.freed else normal(ansi.plain(one.traceback))
        groups.setdefault((one.freed or one.ename, text), []).append(one)
    return [_error_block(errors, error) for errors in groups.values()]


def _error_block(errors: list[RankError], error: SpmdError) -> str:
    first = errors[0]
    is_cause = first is error.first
    title = f"<b>[{escape(error.named(e.rank for e in errors))}]</b> "
    if first.freed:
        title += escape(first.freed_from)
    else:
        colour = markup.ink(markup.RED) if is_cause else "inherit"
        title += f'<b style="color:{colour}">{escape(first.ename)}</b> '
        title += markup.muted(_headline(first))
    notes = []
    if is_cause and len(error.errors) > len(errors):
        notes.append("failed first")
    if len(errors) > 1:
        notes.append(f"same traceback on {len(errors)} ranks{'' if is_cause else ', folded'}")
    if notes:
        title += markup.muted(f" ({', '.join(notes)})")
    text = "\n\n".join(filter(None, (_without_title(first), first.hint)))
    if text:
        title = markup.fold_out(title, markup.code_html(ansi.to_html(text)), is_open=is_cause)
    return markup.bar(title, markup.AMBER if first.freed else markup.RED)


def _without_title(error: RankError) -> str:
    """The traceback without what the title says: IPython's first lines, and the message at its end.

    Its rule of dashes is as wide as a terminal, and wraps in a narrow page.
    """
    lines = (error.traceback.strip("\n") or f"{error.ename}: {error.evalue}").split("\n")
    if len(lines) > 1 and set(ansi.plain(lines[0])) == {"-"}:
        del lines[:2]
    # A message of several lines, or one that the title cuts, is said in full here.
    if lines and ansi.plain(lines[-1]).strip() == f"{error.ename}: {_headline(error)}".strip(": "):
        del lines[-1]
    return "\n".join(lines).strip("\n")


def _headline(error: RankError) -> str:
    line = ansi.plain(error.evalue).strip().partition("\n")[0]
    return line if len(line) <= 160 else line[:159] + "…"


# ---- what a report has -----------------------------------------------------------------------


def _parts(report: CellReport, look: Look) -> tuple[list[Section], dict[int, str]]:
    """What the ranks have printed before their first figures, and those; then the same of their
    second, ...; and the values of their last expressions, where text is all there is of them.

    What a rank displayed as mere text stands between what it printed, in its place.
    """
    sections, values = list[Section](), dict[int, str]()
    for rank, output in report.outputs.items():
        num_figures, texts = 0, list[str]()
        for piece in (*output.pieces(), None):
            if isinstance(piece, str):
                texts.append(ansi.without_moves(piece).rstrip("\n"))
            elif piece is None or look.shows(piece):
                if num_figures == len(sections):
                    sections.append((dict.fromkeys(report.outputs, ""), {}))
                said, figures = sections[num_figures]
                said[rank] = "\n".join(filter(str.strip, texts)) if look.show_texts else ""
                figures |= {rank: piece} if piece is not None else {}
                num_figures, texts = num_figures + 1, []
            elif not is_rich(piece):
                text = str(piece["data"].get("text/plain", ""))
                if piece["kind"] == OutputKind.DISPLAY:
                    texts.append(text)
                else:
                    values[rank] = text
        if report.result is not None and not output.displays:  # of a function
            values[rank] = report.result.value_text(rank)
    return sections, values if look.show_values else {}


def _label(report: CellReport) -> str:
    return f"Out[{report.cell_number}]:" if report.cell_number else "Out:"


def _report_of(result: SpmdResult) -> CellReport:
    return CellReport(result.outputs, result.elapsed_s, result, cell_number=result.cell_number)


# ---- how the cell went -----------------------------------------------------------------------


def heading(report: CellReport) -> str:
    """How a cell went: "8 ranks · ✓ 8 ok · 2.1 s (slowest rank 5: 2.1 s, fastest 1.9 s)"."""
    counts = [text for text, _ in _counts(report)]
    return " · ".join([rank_count(len(report.outputs)), *counts, _times(report)])


def heading_html(report: CellReport) -> str:
    badges = "".join(markup.badge(text, colour) for text, colour in _counts(report))
    return f"<b>{rank_count(len(report.outputs))}</b>{badges}{markup.muted(_times(report))}"


def states_html(states: Mapping[int, str]) -> str:
    """A dot for each rank of a cell that runs, and who does what as soon as they differ."""
    dots, ranks = "", dict[str, list[int]]()
    for rank, state in sorted(states.items()):
        sign, colour = _DOTS.get(state, ("◐", markup.AMBER))
        ranks.setdefault(state, []).append(rank)
        style = f"color:{markup.ink(colour)}"
        dots += f'<span title="rank {rank}: {escape(state)}" style="{style}">{sign}</span>'
    if not dots:
        return ""
    words = escape("; ".join(f"[{format_ranks(same)}] {state}" for state, same in ranks.items()))
    said = "" if list(ranks) == ["running"] else f"{words} · "
    return f'<span role="img" aria-label="{words}" style="letter-spacing:2px">{dots}</span> {said}'


def shown_time(seconds: float) -> str:
    """A time as it is read: 12 ms, 2.1 s, 3 min 5 s."""
    return f"{1000 * seconds:.0f} ms" if seconds < 0.95 else duration(seconds)


def _counts(report: CellReport) -> list[tuple[str, str]]:
    errors = report.error.errors.values() if report.error is not None else ()
    by_user = report.error is not None and report.error.by_user
    # A rank that waited counts once, as waiting, also where an interrupt has freed it.
    freed = sum(one.freed and not by_user for one in errors)
    stopped = sum(by_user or (one.ename == "KeyboardInterrupt" and not one.freed) for one in errors)
    counts = [
        (len(report.outputs) - len(errors), "✓ {} ok", markup.GREEN),
        (len(errors) - freed - stopped, "✗ {} failed", markup.RED),
        (stopped, "{} interrupted", markup.AMBER),
        (freed, "{} was waiting" if freed == 1 else "{} were waiting", markup.AMBER),
    ]
    return [(text.format(n), colour) for n, text, colour in counts if n]


def _times(report: CellReport) -> str:
    took, result = shown_time(report.elapsed_s), report.result
    by_rank = {rank: result.rank_elapsed_s(rank) for rank in result.ranks} if result else {}
    slow, fast = max(by_rank.values(), default=0.0), min(by_rank.values(), default=0.0)
    if slow - fast < 0.1:  # it is chance which rank is the slowest
        return took
    rank = max(by_rank, key=by_rank.__getitem__)
    return f"{took} (slowest rank {rank}: {shown_time(slow)}, fastest {shown_time(fast)})"
