"""The bar of a pool as data, text and HTML. Runs on the client."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from gpupool.core.formatting import duration, format_ranks
from gpupool.core.machine.topology import Rank
from gpupool.notebook.page import markup
from gpupool.pool.status import PoolStatus

_COLOURS = {
    "idle": markup.GREEN,
    "busy": markup.AMBER,
    "replacing": markup.AMBER,
    "broken": markup.RED,
    "stopped": markup.GREY,
}
NO_PROCESS = "–"  # in the column of process ids: the rank's has ended
RANK_COLUMNS = ("rank", "device", "threads", "pid")
_PILL = "border:1px solid;border-radius:10px;padding:0 8px;white-space:nowrap"
_NUM_NAMES = 3  # so many variables are named in the bar itself, more only in its details


@dataclass(frozen=True, slots=True)
class Bar:
    """A pool's bar, ready to draw: `ranks` are rows of `RANK_COLUMNS`, `more` label and text.

    `colour` is that of the state, `edge` that of the notice.

    `idle_left_s` are the seconds until the pool stops unless it is used; None: it does not.
    """

    title: str
    state: str
    colour: str
    line: str
    notice: str
    edge: str
    ranks: tuple[tuple[str, ...], ...]
    more: tuple[tuple[str, str], ...]
    idle_left_s: float | None


def bar_of(status: PoolStatus) -> Bar:
    """What the bar of a pool shows."""
    notice, edge = status.reason, _COLOURS[status.state]
    if status.stops_soon:
        notice = f"{notice}\nThe pool {countdown(status)}.".lstrip()
        edge = markup.AMBER if status.state == "idle" else edge
    return Bar(
        title=_title(status),
        state=status.state,
        colour=_COLOURS[status.state],
        line=" · ".join(_bar_facts(status)),
        notice=notice,
        edge=edge,
        ranks=tuple(rank_rows(status)),
        more=tuple(_more(status)),
        # A pool that works does not count down; a broken one does, as nobody can use it.
        idle_left_s=status.idle_left_s if status.state in ("idle", "broken") else None,
    )


def status_text(status: PoolStatus) -> str:
    """One line on the pool and one for each rank."""
    lines = [f"{_title(status)}: {status.state}, " + ", ".join(_facts(status))]
    if status.reason:
        lines.append(status.reason)
    for rank, device, threads, pid in rank_rows(status):
        plural = "" if threads == "1" else "s"
        process = "no process" if pid == NO_PROCESS else f"pid {pid}"
        lines.append(f"  rank {rank}  {device}  {threads} thread{plural}  {process}")
    return "\n".join(lines)


def status_html(status: PoolStatus, uid: str = "") -> str:
    """The pool's bar; the details unfold.

    Args:
        uid: the bar's name in the page, by which `static/pool_bar.js` finds it and brings it to
            life: it fills the elements of the classes gpb-*. Without a name it stays as it is.
    """
    bar = bar_of(status)
    head = "".join((
        f'<span class="gpb-dot" style="color:{bar.colour}">●</span>',
        f"<b>{escape(bar.title)}</b>",
        f'<span class="gpb-state" style="{_PILL};border-color:{bar.colour}">{bar.state}</span>',
        f'<span class="gpb-facts" style="opacity:.75;flex:1 1 260px">{escape(bar.line)}</span>',
        '<span class="gpb-buttons"></span>' if uid else "",
    ))  # fmt: skip
    notice = (
        f'<div class="gpb-reason" style="border-left:3px solid {bar.edge};padding-left:10px;'
        f'margin:6px 0 0;white-space:pre-wrap{"" if bar.notice else ";display:none"}">'
        f"{escape(bar.notice)}</div>"
    )
    details = (
        '<details class="gpb-details" style="margin:4px 0 0">'
        '<summary style="cursor:pointer">Details</summary>'
        f"{markup.scroller(_details(bar), 'Details of the pool')}</details>"
    )
    row = f'<div style="display:flex;flex-wrap:wrap;align-items:center;gap:4px 8px">{head}</div>'
    named = f' class="gpupool-bar gpupool-bar-{uid}"' if uid else ""
    return f'<div{named} style="{markup.CARD}">{row}{notice}{details}</div>'


def rank_rows(status: PoolStatus) -> list[tuple[str, str, str, str]]:
    """(rank, device, threads, pid) of each rank, host by host."""
    return [
        (
            format_ranks([rank.rank], {rank.rank: rank.host}),
            _device(rank, status),
            str(rank.num_threads),
            str(status.pids.get(rank.rank, NO_PROCESS)),
        )
        for rank in status.ranks
    ]


def _title(status: PoolStatus) -> str:
    hosts = {rank.host for rank in status.ranks if rank.host}
    plural = "s" * (len(hosts) > 1)
    return f"Pool of {len(status.ranks)}" + f" on {len(hosts)} host{plural}" * bool(hosts)


def _facts(status: PoolStatus) -> list[str]:
    facts = [_devices(status), _backend(status)]
    if status.env:
        facts.append(f"env: {', '.join(status.env)} (hidden)")
    if status.credentials:
        facts.append(status.credentials)
    left = status.idle_left_s
    if left is None:
        facts.append("no idle timeout")
    elif status.state in ("idle", "busy"):
        facts.append(countdown(status))
    return facts


def _bar_facts(status: PoolStatus) -> list[str]:
    """What the bar says in one line; it stays as it is in the saved notebook."""
    if status.state == "stopped":
        return [_devices(status), status.backend]
    facts = [_devices(status), _backend(status)]
    if len(status.env) > _NUM_NAMES:
        facts.append(f"env: {len(status.env)} variables (hidden)")
    elif status.env:
        facts.append(f"env: {', '.join(status.env)} (hidden)")
    facts.append(_limit(status))
    return facts


def _more(status: PoolStatus) -> list[tuple[str, str]]:
    """The details beside the ranks: label and text."""
    rows = [
        ("Backend", _backend(status)),
        ("Process group", _formed(status.generation - 1)),
        ("Environment", f"{', '.join(status.env)} (values hidden)" if status.env else "–"),
    ]
    if status.credentials:
        rows.append(("Credentials", status.credentials))
    rows.append(("Idle timeout", _limit(status)))
    return rows


def _details(bar: Bar) -> str:
    cell = "text-align:left;padding:2px 12px 2px 0;vertical-align:top"
    rows = "".join(
        f'<tr><th scope="row" style="{cell};white-space:nowrap">{escape(label)}</th>'
        f'<td style="{cell}">{escape(text)}</td></tr>'
        for label, text in bar.more
    )
    facts = f'<table class="gpb-facts-table" style="{markup.FONT}"><tbody>{rows}</tbody></table>'
    ranks = markup.table(RANK_COLUMNS, bar.ranks)
    return f'<div class="gpb-ranks">{ranks}</div>{facts}'


def _formed(num_times: int) -> str:
    """How often the process group was formed again after the start."""
    if num_times <= 0:
        return "as formed at the start"
    return "re-formed once" if num_times == 1 else f"re-formed {num_times} times"


def _backend(status: PoolStatus) -> str:
    if status.training_backend != status.backend:
        return f"{status.backend} (training: {status.training_backend})"
    return status.backend


def _limit(status: PoolStatus) -> str:
    limit = status.idle_timeout_s
    if limit is None:
        return "no idle timeout"
    return f"shuts down after {_minutes(limit)} idle"


def _minutes(seconds: float) -> str:
    return f"{round(seconds / 60)} min" if seconds >= 90 else duration(seconds)


def countdown(status: PoolStatus) -> str:
    left = status.idle_left_s or 0.0
    # whole minutes: this stays as it is in the saved notebook
    return f"shuts down in {_minutes(left)} if idle"


def _devices(status: PoolStatus) -> str:
    names = sorted({rank.gpu.name for rank in status.ranks if rank.gpu})
    if not names:
        return f"CPU ranks: {status.why_cpu}" if status.why_cpu else "CPU ranks"
    spare = len(status.ranks) - len(status.training_ranks)
    shown = f"one engine per GPU ({', '.join(names)})"
    if spare:
        ranks = "1 CPU rank" if spare == 1 else f"{spare} CPU ranks"
        shown += f", {ranks} (not used for training)"
    return shown


def _device(rank: Rank, status: PoolStatus) -> str:
    if rank.gpu is not None:
        return f"{rank.gpu.label}: {rank.gpu.name}"
    return "CPU" if rank.rank in status.training_ranks else "CPU (not used for training)"
