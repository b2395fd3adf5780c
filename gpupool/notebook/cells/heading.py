"""How a cell went, in one line: what the picture of its output begins with. Pure; client."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from gpupool.core.formatting import duration, format_ranks
from gpupool.notebook.page import markup
from gpupool.spmd.cell import CellReport

BLUE = "#0072bd"


def heading(report: CellReport) -> str:
    """How a cell went, in one line.

    "8 ranks · 8 ok · 2.1 s (slowest rank 5: 2.1 s, fastest 1.9 s)"
    """
    parts = [_count(len(report.outputs)), *(text for text, _ in _counts(report)), _times(report)]
    return " · ".join(parts)


def heading_html(report: CellReport) -> str:
    """The same with the counts as badges."""
    badges = [markup.badge(text, colour) for text, colour in _counts(report)]
    name = f"<b>{_count(len(report.outputs))}</b>"
    return name + "".join(badges) + markup.muted(_times(report))


_DOTS = {"running": ("●", BLUE), "done": ("✓", markup.GREEN)}
_WAITS = ("◐", markup.AMBER)


def states_html(states: Mapping[int, str]) -> str:
    """A dot for each rank of a cell that runs, and who does what as soon as they differ."""
    dots, ranks = [], dict[str, list[int]]()
    for rank, state in sorted(states.items()):
        sign, colour = _DOTS.get(state, _WAITS)
        ranks.setdefault(state, []).append(rank)
        dots.append(
            f'<span title="rank {rank}: {escape(state)}" style="color:{markup.ink(colour)}">'
            f"{sign}</span>"
        )
    if not dots:
        return ""
    words = [f"[{format_ranks(same)}] {state}" for state, same in ranks.items()]
    said = "; ".join(words) if words != [f"[{format_ranks(states)}] running"] else ""
    label = escape("; ".join(words))
    return (
        f'<span role="img" aria-label="{label}" style="letter-spacing:2px">{"".join(dots)}</span> '
        f"{escape(said)}{' · ' * bool(said)}"
    )


def _count(num_ranks: int) -> str:
    return f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"


def _counts(report: CellReport) -> list[tuple[str, str]]:
    errors = report.error.errors.values() if report.error else ()
    freed = sum(error.freed for error in errors)
    # A rank that waited counts once, as waiting, also where an interrupt has freed it.
    if report.error is not None and report.error.by_user:
        return [(f"✓ {n} ok", markup.GREEN) for n in [len(report.outputs) - len(errors)] if n] + [
            (f"{len(errors)} interrupted", markup.AMBER)
        ]
    interrupted = sum(error.ename == "KeyboardInterrupt" and not error.freed for error in errors)
    counts = [
        (len(report.outputs) - len(errors), "✓ {} ok", markup.GREEN),
        (len(errors) - freed - interrupted, "✗ {} failed", markup.RED),
        (interrupted, "{} interrupted", markup.AMBER),
        (freed, "{} was waiting" if freed == 1 else "{} were waiting", markup.AMBER),
    ]
    return [(text.format(n), colour) for n, text, colour in counts if n]


def _times(report: CellReport) -> str:
    took, extremes = shown_time(report.elapsed_s), _extremes(report)
    if extremes is None:
        return took
    rank, slowest, fastest = extremes
    return f"{took} (slowest rank {rank}: {shown_time(slowest)}, fastest {shown_time(fastest)})"


def _extremes(report: CellReport) -> tuple[int, float, float] | None:
    """The slowest rank, its seconds and those of the fastest; None if they are much the same."""
    result = report.result
    if result is None or len(result) < 2:
        return None
    by_rank = {rank: result.rank_elapsed_s(rank) for rank in result.ranks}
    slowest, fastest = max(by_rank, key=by_rank.__getitem__), min(by_rank.values())
    # Below a tenth of a second it is chance which rank is the slowest.
    return (slowest, by_rank[slowest], fastest) if by_rank[slowest] - fastest >= 0.1 else None


def shown_time(seconds: float) -> str:
    """A time as it is read: 12 ms, 2.1 s, 3 min 5 s."""
    return f"{1000 * seconds:.0f} ms" if seconds < 0.95 else duration(seconds)
