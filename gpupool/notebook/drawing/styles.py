"""How the plots of a monitor look, as plain data: drawn by the browser and as SVG. Pure; client.

A plot is {"name", "title", "unit" ("%" or ""), "small", "lines"}. A line has the name of its
points, a colour ("accuracy", "loss" and "text" are those of the page's theme), a width, an opacity,
dashes, and dots, if it has no more than so many points. The points of "mean" are drawn `smoothed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Style = dict[str, Any]

SEVERAL = 100  # dots of more validations would hide the other lines
FEW = 40  # of so few points a line would hardly be seen, of one not at all
# mid-tones, as the page may be white or nearly black; their dashes differ too
_OWN: list[tuple[str, tuple[int, ...]]] = [
    ("#1a85d6", ()),
    ("#e0632a", (7, 3)),
    ("#2da44e", (2, 3)),
    ("#a855c7", (9, 3, 2, 3)),
    ("#b58900", (4, 4)),
    ("#12939a", (1, 4)),
]


def line(
    name: str,
    color: str,
    width: float = 1.0,
    alpha: float = 1.0,
    dash: Sequence[int] = (),
    dots: int = 0,
) -> Style:
    """How a line looks."""
    style = {"width": width, "alpha": alpha, "dash": list(dash)}
    return {"name": name, "color": color, **style, "dots": dots}


def entry(label: str, lines: Sequence[Style], *, is_ring: bool = False) -> Style:
    """What stands in the legend for lines that look alike but for their colours."""
    return {**lines[0], "label": label, "colors": [one["color"] for one in lines], "ring": is_ring}


def training_plot(name: str, title: str, unit: str, *, has_steps: bool) -> Style:
    """A plot of a training: each step, smoothed, and validations; or these alone, of a metric."""
    lines = [
        line("raw", name, alpha=0.4, dots=1),
        line("mean", name, width=2),
        line("validation", "text", dash=(5, 4), dots=SEVERAL),
    ]
    shown = lines if has_steps else lines[2:]
    return {"name": name, "title": title, "unit": unit, "small": not has_steps, "lines": shown}


def training_legend(plots: Sequence[Style], *, validated: bool, has_best: bool) -> list[Style]:
    """The legend below the plots of a training."""
    plots = [plot for plot in plots if not plot["small"]]
    raw, mean, validation = ([plot["lines"][n] for plot in plots] for n in range(3))
    entries = [entry("training (smoothed)", mean), entry("training", raw)]
    if validated:
        entries.append(entry("validation", validation[:1]))
    if has_best:
        entries.append(entry("best", [line("best", "text")], is_ring=True))
    return entries


def own_plot(name: str, title: str, metrics: Sequence[str]) -> Style:
    """A plot of a loop of the user's: its lines are named "0", "1", ... and labelled so."""
    # A seventh line looks like the first: more than six in one plot nobody can tell apart.
    looks = [_OWN[n % len(_OWN)] for n in range(len(metrics))]
    lines = [
        {**line(str(n), color, width=2, dash=dash, dots=FEW), "label": metric}
        for n, (metric, (color, dash)) in enumerate(zip(metrics, looks, strict=True))
    ]
    return {"name": name, "title": title, "unit": "", "small": False, "lines": lines}


def own_legend(plots: Sequence[Style], groups: Sequence[Sequence[str]]) -> list[Style]:
    """The legend of the plots that have several lines."""
    several = [(p, names) for p, names in zip(plots, groups, strict=True) if len(names) > 1]
    return [entry(name, [p["lines"][n]]) for p, names in several for n, name in enumerate(names)]
