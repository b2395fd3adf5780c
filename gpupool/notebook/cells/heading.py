"""How a cell went, in one line: what the picture of its output begins with. Pure; client."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from gpupool.core.formatting import duration, format_ranks, rank_count
from gpupool.notebook.page import markup
from gpupool.spmd.cell import CellReport

_DOTS = {"running": ("●", "#0072bd"), "done": ("✓", markup.GREEN)}


def heading(report: CellReport) -> str:
    """How a cell went, in one line.

    "8 ranks · ✓ 8 ok · 2.1 s (slowest rank 5: 2.1 s, fastest 1.9 s)"
    """
    counts = [text for text, _ in _counts(report)]
    return " · ".join([rank_count(len(report.outputs)), *counts, _times(report)])


def heading_html(report: CellReport) -> str:
    """The same with the counts as badges."""
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
    """How many ranks ended in which way, each with its colour."""
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
    """How long it took, and the extremes of the ranks if they are not much the same."""
    took, result = shown_time(report.elapsed_s), report.result
    by_rank = {rank: result.rank_elapsed_s(rank) for rank in result.ranks} if result else {}
    slow, fast = max(by_rank.values(), default=0.0), min(by_rank.values(), default=0.0)
    if slow - fast < 0.1:  # it is chance which rank is the slowest
        return took
    rank = max(by_rank, key=by_rank.__getitem__)
    return f"{took} (slowest rank {rank}: {shown_time(slow)}, fastest {shown_time(fast)})"
