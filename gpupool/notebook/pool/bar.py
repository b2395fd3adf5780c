"""The bar of a pool as text and HTML. Pure functions; runs on the client."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from gpupool.core.formatting import NONE, duration, format_ranks
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
_RANK_COLUMNS = ("rank", "device", "threads", "pid")
_PILL = "border:1px solid;border-radius:10px;padding:0 8px;white-space:nowrap"
_NUM_NAMES = 3  # so many variables are named in the bar itself, more only in its details

Part = Callable[[str, str], str]  # (name, HTML within) -> element


def status_text(status: PoolStatus) -> str:
    """One line on the pool and one for each rank."""
    is_up = status.state in ("idle", "busy")
    when = "no idle timeout" if status.idle_left_s is None else countdown(status) * is_up
    facts = _facts(status, status.credentials, when)
    lines = [f"{_title(status)}: {status.state}, {', '.join(facts)}"]
    if status.reason:
        lines.append(status.reason)
    for rank, device, threads, pid in rank_rows(status):
        plural = "" if threads == "1" else "s"
        process = "no process" if pid == NONE else f"pid {pid}"
        lines.append(f"  rank {rank}  {device}  {threads} thread{plural}  {process}")
    return "\n".join(lines)


def status_html(status: PoolStatus) -> str:
    """The pool's bar; the details unfold."""
    return bar_html(status, lambda _name, inner: inner)


def bar_html(status: PoolStatus, part: Part) -> str:
    """The bar of a pool, of elements that `part` makes: its "head", place for "buttons", "rest"."""
    parts = parts_of(status)
    row = part("head", parts["head"]) + part("buttons", "")
    row = f'<div style="display:flex;flex-wrap:wrap;align-items:center;gap:4px 8px">{row}</div>'
    return (
        f'<div class="gpupool-bar gpl-frame" style="{markup.CARD}">{row}'
        f"{part('rest', parts['rest'])}</div>"
    )


def parts_of(status: PoolStatus) -> dict[str, str]:
    """What the bar shows. It stays true in a saved notebook: it counts down only near the end."""
    colour = edge = _COLOURS[status.state]
    notice = status.reason
    if status.stops_soon:
        notice = f"{notice}\nThe pool {countdown(status)}.".lstrip()
        edge = markup.AMBER if status.state == "idle" else edge
    limit = status.idle_timeout_s
    when = "no idle timeout" if limit is None else f"shuts down after {_minutes(limit)} idle"
    facts = _facts(status, when)
    head = (
        f'<span style="color:{colour}">●</span> <b>{escape(_title(status))}</b> '
        f'<span class="gpb-state" style="{_PILL};border-color:{colour}">{status.state}</span> '
        f'<span style="opacity:.75">{escape(" · ".join(facts))}</span>'
    )
    rest = (
        f'<div style="border-left:3px solid {edge};padding-left:10px;margin:6px 0 0;'
        f'white-space:pre-wrap{"" if notice else ";display:none"}">{escape(notice)}</div>'
        '<details class="gpb-details" style="margin:4px 0 0">'
        '<summary style="cursor:pointer">Details</summary>'
        f"{markup.scroller(_details(status), 'Details of the pool')}</details>"
    )
    return {"head": head, "rest": rest}


def rank_rows(status: PoolStatus) -> list[tuple[str, str, str, str]]:
    """(rank, device, threads, pid) of each rank, host by host."""
    return [
        (
            format_ranks([rank.rank], {rank.rank: rank.host}),
            _device(rank, status),
            str(rank.num_threads),
            str(status.pids.get(rank.rank, NONE)),
        )
        for rank in status.ranks
    ]


def countdown(status: PoolStatus) -> str:
    """When the pool stops, if nobody uses it."""
    return f"shuts down in {_minutes(status.idle_left_s or 0.0)} if idle"


def _title(status: PoolStatus) -> str:
    hosts = {rank.host for rank in status.ranks if rank.host}
    plural = "s" * (len(hosts) > 1)
    return f"Pool of {len(status.ranks)}" + f" on {len(hosts)} host{plural}" * bool(hosts)


def _facts(status: PoolStatus, *more: str) -> list[str]:
    if status.state == "stopped":
        return [_devices(status), status.backend]
    env = f"{len(status.env)} variables" if len(status.env) > _NUM_NAMES else ", ".join(status.env)
    env = f"env: {env} (hidden)" if status.env else ""
    backend, training = status.backend, status.training_backend
    backend += f" (training: {training})" if training != backend else ""
    return [fact for fact in (_devices(status), backend, env, *more) if fact]


def _details(status: PoolStatus) -> str:
    """The ranks, and what else there is to know."""
    more = [f"process group formed {status.generation} time{'s' * (status.generation != 1)}"]
    more += [f"env: {', '.join(status.env)} (values hidden)"] if status.env else []
    more += [status.credentials] if status.credentials else []
    return markup.table(_RANK_COLUMNS, rank_rows(status)) + markup.muted(" · ".join(more))


def _minutes(seconds: float) -> str:
    return f"{round(seconds / 60)} min" if seconds >= 90 else duration(round(seconds))


def _devices(status: PoolStatus) -> str:
    names = sorted({rank.gpu.name for rank in status.ranks if rank.gpu})
    if not names:
        return f"CPU ranks: {status.why_cpu}" if status.why_cpu else "CPU ranks"
    spare = len(status.ranks) - len(status.training_ranks)
    shown = f"one engine per GPU ({', '.join(names)})"
    others = f", {spare} CPU rank{'s' * (spare > 1)} (not used for training)"
    return shown + others * bool(spare)


def _device(rank: Rank, status: PoolStatus) -> str:
    if rank.gpu is not None:
        return f"{rank.gpu.label}: {rank.gpu.name}"
    return "CPU" if rank.rank in status.training_ranks else "CPU (not used for training)"
