"""What a training leaves behind, and why it is slow, as HTML. Runs on the client."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

from gpupool.core.formatting import percent, short_name
from gpupool.core.wire.events import PHASES, ValidationEvent
from gpupool.notebook.monitor import plots
from gpupool.notebook.page import markup
from gpupool.training import doctor, result
from gpupool.training.scaling import COLUMNS, Scaling

if TYPE_CHECKING:
    from gpupool.training.inference import ConfusionMatrix

_MAX_SHOWN = 40  # classes
_RIGHT, _WRONG = "0,114,189", "217,83,25"  # as MATLAB's confusionchart has them
# Mid-tones for light and dark pages; what computes is the quietest of them.
_INKS = ("#e0632a", "#8c959f", "#1a85d6", "#2da44e", "#a855c7", "#b58900", "#12939a", "#57606a")
_COLORS = dict(zip(PHASES, _INKS, strict=True))


def result_html(found: result.TrainingResult) -> str:
    colour = markup.GREEN if found.history.status == "finished" else markup.AMBER
    state, _, rest = found.headline.partition(", ")
    badge = markup.badge(state, colour)
    head = f"<div><b>Training result</b>{badge}{markup.muted(rest)}</div>"
    warnings = "".join(markup.bar(escape(text), markup.AMBER) for text in found.warnings)
    rows = [(markup.Html(markup.muted(label)), value) for label, value in found.rows()]
    return markup.card(head, warnings, markup.table((), rows, ";overflow-wrap:anywhere"))


def validation_html(event: ValidationEvent) -> str:
    when = f"after step {event.step:,}, epoch {event.epoch}"
    best = markup.badge("best so far", markup.GREEN) if event.is_best else ""
    head = f"<div><b>Validation</b> {markup.muted(when)}{best}</div>"
    names, values = zip(*result.measured_by(event), strict=True)
    return markup.card(head, markup.table(names, [values]))


def validation_text(event: ValidationEvent) -> str:
    values = result.in_words(result.measured_by(event))
    return f"Validation after step {event.step:,} (epoch {event.epoch}): {values}"


def confusion_html(matrix: ConfusionMatrix) -> str:
    """Rows are true classes, columns predicted ones; recall beside each row, precision below each
    column. Of very many classes, the pairs that were confused most often.
    """
    head = f"<div><b>Confusion matrix</b> {markup.muted(matrix.summary())}</div>"
    if len(matrix.classes) > _MAX_SHOWN:
        rows = [(true, said, f"{number:,}") for true, said, number in matrix.most_confused(20)]
        rest = markup.muted("Each class: matrix.recall, matrix.precision")
        return markup.card(head, markup.table(("true class", "taken for", "times"), rows), rest)
    uid, names = f"gp{secrets.token_hex(4)}", [escape(short_name(c, 22)) for c in matrix.classes]
    # Long names stand upright above the columns.
    is_long = len(names) > 12 or any(len(name) > 6 for name in matrix.classes)
    above = [f"<span>{name}</span>" if is_long else name for name in names]
    columns = "".join(f'<th scope="col">{name}</th>' for name in above)
    shares, recall = matrix.shares.tolist(), matrix.recall.tolist()
    precision = "".join(map(_share, matrix.precision.tolist()))
    body = "".join(
        f'<tr><th scope="row">{name}</th>{_cells(matrix, n, shares[n])}{_share(recall[n])}</tr>'
        for n, name in enumerate(names)
    )
    table = (
        f'<table><thead><tr><th scope="col">true \\ predicted</th>{columns}'
        f'<th scope="col" class="gp-share">recall</th></tr></thead><tbody>{body}</tbody><tfoot><tr>'
        f'<th scope="row" class="gp-share">precision</th>{precision}'
        '<td class="gp-share"></td></tr></tfoot></table>'
    )
    style = markup.compact_style(markup.static_text("confusion.css")).replace("UID", uid)
    scroller = markup.scroller(table, "Confusion matrix")
    return markup.card(f'<div id="{uid}"><style>{style}</style>{head}{scroller}</div>')


def _cells(matrix: ConfusionMatrix, row: int, shares: list[float]) -> str:
    """A row of numbers; the more of its row a number is, the stronger its colour."""
    cells, true = "", escape(matrix.classes[row])
    for n, count in enumerate(matrix.counts[row].tolist()):
        words = f"{count:,} of {true}, {_percent(shares[n])}, taken for {escape(matrix.classes[n])}"
        # Never quite opaque: the text keeps the colour of the page, light or dark.
        colour = f"rgba({_RIGHT if n == row else _WRONG},{0.12 + 0.5 * shares[n]:.2f})"
        style = f"background:{colour}" + ";font-weight:600" * (n == row)
        cells += f'<td title="{words}" style="{style}">{count:,}</td>' if count else "<td></td>"
    return cells


def _share(share: float) -> str:
    return f'<td class="gp-share">{_percent(share)}</td>'


def _percent(share: float) -> str:
    return percent(None if math.isnan(share) else share)


# ---- what the doctor and `gpupool.scaling` have found -------------------------------------------


def diagnosis_html(found: doctor.Diagnosis) -> str:
    colour = markup.GREEN if found.verdict == "balanced" else markup.AMBER
    head = f"<div>{markup.badge(found.verdict, colour)}<b>{escape(found.sentence)}</b></div>"
    following = f"<div>Next: {escape(found.next_step)}</div>"
    notes = f"<div>{markup.muted(found.measured)}</div>" if found.measured else ""
    return markup.card(head, following, shares_html(found.shares), notes)


def shares_html(shares: doctor.Shares) -> str:
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
        f"{escape(doctor.PHASE_WORDS[name])} {percent(share, 0)}</span>"
        for name, share in shares.mean.items()
        if share >= doctor.LEAST_SHOWN
    )
    return f'<div style="margin:6px 0;max-width:640px">{rows}<div>{key}</div></div>'


def share_bar(shares: Mapping[str, float]) -> str:
    """What one rank spent its time on, as one bar; its name says it in words."""
    parts = "".join(
        f'<span style="flex:{share:.4f} 0 0;background:{_COLORS[name]}"></span>'
        for name, share in shares.items()
        if share >= doctor.LEAST_SHOWN
    )
    style = "display:flex;flex:1 1 auto;height:12px;min-width:80px;border-radius:3px"
    label = escape(doctor.in_words(shares))
    return (
        f'<span role="img" aria-label="{label}" title="{label}" style="{style};overflow:hidden">'
        f"{parts}</span>"
    )


def scaling_html(found: Scaling) -> str:
    head = f"<div><b>{escape(found.sentence)}</b> {markup.muted(f'{found.mode} scaling')}</div>"
    table = markup.scroller(markup.table(COLUMNS, found.table()), "Each number of ranks")
    return markup.card(head, f'<div style="max-width:42em">{_scaling_image(found)}</div>', table)


def _scaling_image(found: Scaling) -> str:
    numbers = [one.num_ranks for one in found.sizes]
    speeds = [(one.num_ranks, found.speedup(one)) for one in found.sizes]
    looks = [plots.own_plot("speed", "speed-up", ["measured", "ideal"])]
    steps = {"low": 0, "high": numbers[-1], "per_epoch": 0, "label": "ranks"}
    view = {"plots": looks, "legend": plots.legend(looks), "latest": {"speed": found.sentence}}
    ideal = [(num, num / numbers[0]) for num in numbers]
    lines = {"speed": {"0": speeds, "1": ideal}}
    return plots.image({**view, "axes": {"steps": steps, "best": {}}}, lines)
