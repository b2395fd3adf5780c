"""What the doctor and `gpupool.scaling` have found, as HTML. Runs on the client."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from gpupool.core.formatting import percent
from gpupool.core.wire.events import PHASES
from gpupool.notebook.monitor import svg
from gpupool.notebook.page import markup
from gpupool.training.doctor import LEAST_SHOWN, PHASE_WORDS, Diagnosis, Shares, in_words
from gpupool.training.scaling import COLUMNS, Scaling

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
_WIDTH, _HEIGHT, _LEFT, _TOP = 300, 180, 46, 30


def diagnosis_html(found: Diagnosis) -> str:
    """The verdict, what to do next, and what each rank spent its time on."""
    colour = markup.GREEN if found.verdict == "balanced" else markup.AMBER
    head = f"<div>{markup.badge(found.verdict, colour)}<b>{escape(found.sentence)}</b></div>"
    following = f"<div>Next: {escape(found.next_step)}</div>"
    notes = f"<div>{markup.muted(escape(found.measured))}</div>" if found.measured else ""
    return markup.card(head, following, shares_html(found.shares), notes)


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
        f"{escape(PHASE_WORDS[name])} {percent(share, 0)}</span>"
        for name, share in shares.mean.items()
        if share >= LEAST_SHOWN
    )
    return f'<div style="margin:6px 0;max-width:640px">{rows}<div>{key}</div></div>'


def share_bar(shares: Mapping[str, float]) -> str:
    """What one rank spent its time on, as one bar; its name says it in words."""
    parts = "".join(
        f'<span style="flex:{share:.4f} 0 0;background:{_COLORS[name]}"></span>'
        for name, share in shares.items()
        if share >= LEAST_SHOWN
    )
    style = "display:flex;flex:1 1 auto;height:12px;min-width:80px;border-radius:3px"
    label = escape(in_words(shares))
    return (
        f'<span role="img" aria-label="{label}" title="{label}" style="{style};overflow:hidden">'
        f"{parts}</span>"
    )


def scaling_html(found: Scaling) -> str:
    """The sentence, speed-up as a plot, and the table."""
    head = f"<div><b>{escape(found.sentence)}</b> {markup.muted(f'{found.mode} scaling')}</div>"
    table = markup.scroller(markup.table(COLUMNS, found.table()), "Each number of ranks")
    return markup.card(head, f'<div style="max-width:30em">{scaling_image(found)}</div>', table)


def scaling_image(found: Scaling) -> str:
    """Speed-up with its range, beside the ideal one, over ranks."""
    numbers = [one.num_ranks for one in found.sizes]
    ideal = [(n, n / numbers[0]) for n in numbers]
    speeds = [(one.num_ranks, found.speedup(one)) for one in found.sizes]
    least = found.sizes[0].rate
    ranges = [(min(one.rates) / least, max(one.rates) / least) for one in found.sizes]
    ranks = svg.Axis(numbers[0] - 0.5, numbers[-1] + 0.5, numbers)
    values = svg.nice_axis(0, max(ideal[-1][1], *(high for _, high in ranges)))
    x, y = svg.scale(ranks, 0, _WIDTH), svg.scale(values, _HEIGHT, 0)
    bars = "".join(
        f"M{x(n):.1f} {y(low):.1f}V{y(high):.1f}"
        for n, (low, high) in zip(numbers, ranges, strict=True)
    )
    inner = svg.text(0, -12, "speed-up", "start", ' font-weight="600" font-size="13"')
    inner += svg.grid(_WIDTH, _HEIGHT, ranks, values, "ranks")
    inner += svg.polyline(ideal, x, y, 'stroke="currentColor" stroke-dasharray="5 4"')
    line = svg.polyline(speeds, x, y, 'stroke="currentColor" stroke-width="2"')
    line += f'<path d="{bars}" stroke="currentColor"/>{svg.markers(speeds, x, y)}'
    inner = f'<g transform="translate({_LEFT},{_TOP})">{inner}<g color="#1a85d6">{line}</g></g>'
    return svg.picture(inner, _LEFT + _WIDTH + 20, _HEIGHT + _TOP + 40, found.sentence)
