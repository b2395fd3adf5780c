"""The words, tables and bars of a monitor as HTML. Pure functions; they run on the client."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gpupool.core.formatting import clock_time
from gpupool.notebook.monitor import words
from gpupool.notebook.monitor.doctor_view import shares_html
from gpupool.training.doctor import Shares
from gpupool.training.history import TrainingHistory


def header(headline: str, progress: float | None, remaining: str, *, is_failed: bool) -> str:
    """What happens, and how far that is; None: nobody knows how much there is."""
    failed = " gpm-failed" if is_failed else ""
    bar = f'<progress max="1" value="{progress or 0:.3g}" aria-label="Share of the training done">'
    return (
        f'<b class="gpm-status{failed}" role="status">{escape(headline)}</b>'
        f"{'' if progress is None else f'{bar}</progress>'}"
        f'<span class="gpm-remaining">{escape(remaining)}</span>'
    )


def notices(texts: Sequence[str]) -> str:
    """What should be known at once, a block each."""
    style = "white-space:pre-wrap"  # also where style sheets are taken out
    return "".join(
        f'<div class="gpm-notice" style="{style}">{escape(text)}</div>' for text in texts if text
    )


def tables(sections: words.Table) -> str:
    """The tables beside the plots."""
    return "".join(_table(escape(title), rows) for title, rows in sections)


def _table(title: str, rows: words.Rows) -> str:
    body = "".join(
        f'<tr><th scope="row"{_whole(label)}>{escape(label)}</th><td>{escape(value)}</td></tr>'
        for label, value in rows
    )
    return (
        f'<details open=""><summary>{title}</summary>'
        f'<table aria-label="{title}"><tbody>{body}</tbody></table></details>'
    )


def _whole(label: str) -> str:
    """A long name, such as that of a metric, is cut; the pointer shows the whole of it."""
    return f' title="{escape(label)}"' if len(label) > 24 else ""


def ranks(history: TrainingHistory) -> str:
    """How each rank fared last. Many ranks scroll."""
    if not history.ranks:
        return ""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in words.RANK_COLUMNS)
    slowest, note = words.slowest(history)
    badge, rows = f' <span class="gpm-badge">{escape(note)}</span>', ""
    for rank, shown in words.rank_rows(history).items():
        cells = [_share(share, text) for text, share in shown]
        cells[-1] += badge if note and rank == slowest else ""
        row = "".join(f"<td>{cell}</td>" for cell in cells)
        rows += f'<tr><th scope="row">{escape(rank)}</th>{row}</tr>'
    # Each region of a page has a name of its own.
    began = clock_time(history.start.started_at) if history.start else ""
    name = f"How each rank fared: training of {began}, step {len(history.steps)}"
    return (
        '<details class="gpm-ranks" open=""><summary>'
        f'<b class="gpm-rank-title">{words.rank_title(history)}</b> '
        f'<span class="gpm-rank-summary">{words.rank_summary(history)}</span></summary>'
        f'<div class="gpm-scroll" role="region" aria-label="{escape(name)}" tabindex="0"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        f"{shares_html(Shares.of_history(history))}</details>"
    )


def _share(share: float | None, text: str) -> str:
    """A bar beside its words; the words alone where nobody knows the share."""
    if share is None:
        return escape(text)
    return f'<div><i><i style="width:{100 * share:.0f}%"></i></i>{escape(text)}</div>'
