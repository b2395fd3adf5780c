"""What the doctor and `gpupool.scaling` have found, as HTML. Runs on the client."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from gpupool.core.formatting import percent
from gpupool.core.wire.events import PHASES
from gpupool.notebook.monitor import svg
from gpupool.notebook.page import markup
from gpupool.training.doctor import PHASE_WORDS, Diagnosis, Shares
from gpupool.training.machine import HEADER, Machine
from gpupool.training.result import Operators
from gpupool.training.scaling import COLUMNS, Scaling, Size

# Mid-tones for light and dark pages; what computes is the quietest of them.
_COLORS = dict(
    zip(
        PHASES,
        (
            *("#e0632a", "#8c959f", "#1a85d6", "#2da44e"),
            *("#a855c7", "#b58900", "#12939a", "#57606a"),
        ),
        strict=True,
    )
)
_LEAST = 0.005  # of the time: less is no wider than a line
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 300, 180, 46, 30, 70


def diagnosis_html(found: Diagnosis) -> str:
    """The verdict, what each rank spent its time on, numbers, and what to do next."""
    colour = markup.GREEN if found.verdict == "balanced" else markup.AMBER
    head = f"<div>{markup.badge(found.verdict, colour)}<b>{escape(found.sentence)}</b></div>"
    following = [f"<div>Next: {escape(found.next_step)}</div>"] if found.next_step else []
    evidence = markup.table(("", "measured"), found.evidence.items()) if found.evidence else ""
    missing = "".join(f"<div>{markup.muted(f'not measured: {one}')}</div>" for one in found.missing)
    return markup.card(head, *following, shares_html(found.shares), evidence, missing)


def shares_html(shares: Shares) -> str:
    """A bar for each rank, with a key below."""
    if not shares.by_rank:
        return ""
    rows = "".join(
        f'<div style="display:flex;align-items:center;margin:3px 0">'
        f'<span style="flex:0 0 5em">rank {rank}</span>{share_bar(of_rank)}</div>'
        for rank, of_rank in shares.by_rank.items()
    )
    key = " ".join(
        f'<span style="white-space:nowrap;margin-right:12px"><span aria-hidden="true" style="'
        f'background:{_COLORS[name]};padding:0 6px;margin-right:4px"></span>'
        f"{escape(PHASE_WORDS[name])} {percent(shares.mean(name))}</span>"
        for name in PHASES
        if shares.mean(name) >= _LEAST
    )
    return f'<div style="margin:6px 0;max-width:640px">{rows}<div>{key}</div></div>'


def share_bar(shares: Mapping[str, float]) -> str:
    """What one rank spent its time on, as one bar; its name says it in words."""
    words = ", ".join(
        f"{PHASE_WORDS[name]} {percent(share)}" for name, share in shares.items() if share >= _LEAST
    )
    parts = "".join(
        f'<span style="flex:{share:.4f} 0 0;background:{_COLORS[name]}"></span>'
        for name, share in shares.items()
        if share >= _LEAST
    )
    style = "display:flex;flex:1 1 auto;height:12px;min-width:80px;border-radius:3px"
    label = escape(words)
    return (
        f'<span role="img" aria-label="{label}" title="{label}" style="{style};overflow:hidden">'
        f"{parts}</span>"
    )


def machine_html(found: Machine) -> str:
    """The table of the machine."""
    return markup.card(markup.scroller(markup.table(HEADER, found.rows), "The machine"))


def operators_html(found: Operators) -> str:
    """The table of the dearest operators."""
    return markup.card(
        markup.scroller(markup.table(found.HEADER, found.rows()), "The dearest operators")
    )


def scaling_html(found: Scaling) -> str:
    """The sentence, speed-up and efficiency as plots, and the table."""
    head = f"<div><b>{escape(found.sentence)}</b> {markup.muted(f'{found.mode} scaling')}</div>"
    table = markup.scroller(markup.table(COLUMNS, found.table()), "Each number of ranks")
    return markup.card(head, scaling_image(found), table)


def scaling_image(found: Scaling) -> str:
    """Speed-up beside the ideal one, and efficiency with its range, by the number of ranks."""
    most = found.sizes[-1].num_ranks / found.sizes[0].num_ranks
    speed = [(one, found.speedup(one)) for one in found.sizes]
    ideal = [(one, one.num_ranks / found.sizes[0].num_ranks) for one in found.sizes]
    left = _plot("speed-up", svg.nice_axis(0, most), found, speed, ideal)
    efficiency = [(one, found.efficiency(one)[0]) for one in found.sizes]
    right = _plot(
        "efficiency", svg.nice_axis(0, 1), found, efficiency, [(o, 1.0) for o in found.sizes]
    )
    width = _LEFT + 2 * _WIDTH + _GAP + 20
    moved = f'<g transform="translate({_LEFT},{_TOP})">{left}</g>'
    moved += f'<g transform="translate({_LEFT + _WIDTH + _GAP},{_TOP})">{right}</g>'
    return svg.picture(moved, width, _HEIGHT + _TOP + 40, found.sentence)


def _plot(
    title: str,
    values: svg.Axis,
    found: Scaling,
    measured: list[tuple[Size, float]],
    ideal: list[tuple[Size, float]],
) -> str:
    """Over ranks, each twice as many as far from the last: lines are straight where all is well."""
    place = {
        one.num_ranks: _WIDTH * (n + 0.5) / len(found.sizes) for n, one in enumerate(found.sizes)
    }
    y = svg.scale(values, _HEIGHT, 0)
    lines = "".join(f"M0 {y(tick):.1f}H{_WIDTH}" for tick in values.ticks)
    out = [
        svg.text(-_LEFT, -12, title, "start", ' font-weight="600" font-size="13"'),
        f'<path d="{lines}" stroke="currentColor" stroke-opacity=".25"/>',
        *(svg.text(-6, y(tick) + 4, svg.tick_label(tick), "end") for tick in values.ticks),
        *(svg.text(at, _HEIGHT + 15, str(num)) for num, at in place.items()),
        svg.text(_WIDTH / 2, _HEIGHT + 30, "ranks"),
        _line([(place[one.num_ranks], y(value)) for one, value in ideal], 'stroke-dasharray="5 4"'),
        _line(
            [(place[one.num_ranks], y(value)) for one, value in measured],
            'stroke-width="2"',
            "#1a85d6",
        ),
    ]
    for one, value in measured:
        low, high = (value * rate / one.rate for rate in (min(one.rates), max(one.rates)))
        at = f"M{place[one.num_ranks]:.1f} {y(low):.1f}V{y(high):.1f}"
        out.append(f'<path d="{at}" stroke="#1a85d6"/>')
        out.append(
            f'<circle cx="{place[one.num_ranks]:.1f}" cy="{y(value):.1f}" r="3" fill="#1a85d6"/>'
        )
    return "".join(out)


def _line(points: list[tuple[float, float]], style: str, color: str = "currentColor") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline fill="none" stroke="{color}" {style} points="{path}"/>'
