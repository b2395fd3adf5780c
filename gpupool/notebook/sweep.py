"""`gpupool.sweep`: search a space of parameters, and show it where the user is. Client.

In a notebook it is a table that is drawn again as its trials run, else lines.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from gpupool.core.formatting import NONE, duration, measured, short_name
from gpupool.core.terminal import plain, write_line
from gpupool.notebook.monitor import svg
from gpupool.notebook.monitor.curves import thinned
from gpupool.notebook.page import markup
from gpupool.notebook.page.cell_output import Place
from gpupool.notebook.page.front_end import has_reader, in_notebook
from gpupool.notebook.pool.pool_bar import interrupt_button
from gpupool.training.sweep import SweepProgress, SweepResult, Trial, run_sweep

REDRAW_EVERY_S = 0.5
MAX_ROWS = 200
MAX_RUNNING_ROWS = 50  # while it runs, as they are drawn again and again
_OVER = ("finished", "stopped")
_COLOURS = {"running": markup.AMBER, "done": markup.GREEN, "failed": markup.RED}
_CELL = 'style="text-align:left;vertical-align:top;padding:2px 12px 2px 4px"'
_RING = f' style="outline:2px solid {markup.GREEN};outline-offset:-2px"'
_HEAD = "display:flex;flex-wrap:wrap;align-items:center;gap:4px 12px;font-weight:600"
_BAR = "width:16em;max-width:40%;accent-color:#0072bd"
_TABLE = f"{markup.FONT};margin:6px 0;border-collapse:collapse;font-variant-numeric:tabular-nums"
_WIDTH, _HEIGHT, _EDGE = 90, 18, 4  # of a sparkline, pixels


def sweep(
    objective: Callable[[dict[str, Any]], Any],
    space: Mapping[str, Any],
    *,
    trials: int | None = None,
    sampler: Any = "tpe",
    pruner: Any = None,
    direction: str = "minimize",
    metric: str | None = None,
    storage: str | os.PathLike[str] | None = None,
    name: str | None = None,
    seed: int | None = None,
    on: str = "ranks",
) -> SweepResult:
    """Search `space` for the parameters that are best for `objective`, and show how it goes.

    A pool is started if none runs. Each trial has one rank with its device; Optuna (`pip install
    gpupool[sweep]`) chooses its parameters in the notebook. A trial that raises has failed, the
    others go on. The notebook's stop button, and Interrupt beside the table, end it all; what is
    known is returned.

    Args:
        objective: (params) -> value of the metric; `gpupool.report(step, loss=...)` draws its way.
        space: {name: a list of values, a range, (low, high), `gpupool.log(1e-5, 1e-1)`}.
        trials: how many there are in all; of a "grid" all combinations, unless it is given.
        sampler: "tpe", "gp" (Gaussian process), "random", "grid", or one of Optuna's.
        pruner: "median", "hyperband", "successive_halving", or one of Optuna's: ends weak trials.
        direction: "minimize" or "maximize" the metric.
        metric: its name among what is reported; needed where several values are.
        storage: a file, a URL of a database, or s3://, where a sweep of this `name` continues after
            the notebook has died.
        seed: of the sampler.
        on: "notebook" runs trials here, one by one, for an objective that calls `gpupool.train`.

    Raises:
        OptionsError, DataError: an argument is wrong, or the storage; or Optuna is not installed.
        SpmdError: the first trials have all failed.
    """
    __tracebackhide__ = True
    how: dict[str, Any] = {"sampler": sampler, "pruner": pruner, "direction": direction}
    how |= {"metric": metric, "storage": storage, "name": name, "seed": seed, "on": on}
    return run_sweep(None, objective, space, trials=trials, show=SweepView(), **how)


class SweepView:
    """Shows a sweep: by a table in a notebook, by lines on a terminal and in papermill's log."""

    def __init__(self) -> None:
        self._place = Place() if in_notebook() else None
        self._told: set[int] | None = None
        self._drawn_at = -math.inf

    def __call__(self, progress: SweepProgress) -> None:
        """Show what is new."""
        is_over, summary = progress.status in _OVER, _summary(progress)
        ended = [trial for trial in progress.trials if trial.state != "running"]
        if self._told is None:  # those of an earlier run
            self._told = {trial.number for trial in ended}
        ended = [trial for trial in ended if trial.number not in self._told]
        self._told.update(trial.number for trial in ended)
        lines = [f"{_found(t, progress)}; {t.state} in {duration(t.elapsed_s)}" for t in ended]
        lines += summary if is_over else []
        if lines and (self._place is None or not has_reader()):
            write_line("\n".join(lines), sys.stdout)
        now = time.monotonic()
        if self._place and (is_over or now - self._drawn_at >= REDRAW_EVERY_S):
            self._drawn_at, text = now, "\n".join(summary)
            self._place.show({"text/html": sweep_html(progress), "text/plain": text})


def result_html(result: SweepResult) -> str:
    """The table of a sweep that is over."""
    return sweep_html(result.progress)


def sweep_html(progress: SweepProgress) -> str:
    """How far a sweep is, its best trial in words, and a row for each trial.

    It is complete without scripts. Where the pool has a bar, that fills the place of a button.
    """
    headline, *words = (f"<div>{escape(line)}</div>" for line in _summary(progress))
    trials, best, is_over = progress.trials, progress.best, progress.status in _OVER
    if not is_over:
        share = sum(trial.state != "running" for trial in trials) / progress.num_trials
        headline += f'<progress value="{share:.3f}" aria-label="Trials" style="{_BAR}"></progress>'
        headline += interrupt_button()
    # If these are too many: the best, those that run, and the last.
    drawn = sorted(trials, key=lambda t: (t is not best, t.state != "running", -t.number))
    drawn = drawn[: MAX_ROWS if is_over else MAX_RUNNING_ROWS]
    table = _table(sorted(drawn, key=lambda trial: trial.number), progress) if drawn else ""
    rest = f"{len(trials) - len(drawn)} more trials are not drawn; table() of the result has them."
    more = markup.muted(rest) if len(drawn) < len(trials) else ""
    return markup.card(f'<div style="{_HEAD}">{headline}</div>', *words, table, more)


def _table(trials: Sequence[Trial], progress: SweepProgress) -> str:
    names = list(dict.fromkeys(name for trial in trials for name in trial.params))
    header = ["trial", "state", *names, progress.metric, "course", "time", "rank"]
    head = "".join(f'<th scope="col" {_CELL}>{escape(_shown(name))}</th>' for name in header)
    last_step = max((step for trial in trials for step, _ in trial.course), default=0)
    rows, best = "", progress.best
    for trial in trials:
        state = markup.badge(trial.state, _COLOURS.get(trial.state, markup.GREY))
        state += markup.badge("best", markup.GREEN) if trial is best else ""
        if trial.error:
            style = "min-width:12em;overflow-wrap:anywhere"
            state += f'<div style="{style}">{escape(plain(trial.error))}</div>'
        cells = [state, *(escape(_shown(trial.params.get(name, NONE))) for name in names)]
        cells += [measured(progress.metric, trial.value)]
        cells += [_sparkline(trial, progress.metric, last_step), duration(trial.elapsed_s)]
        cells += [NONE if trial.rank is None else str(trial.rank)]
        row = "".join(f"<td {_CELL}>{cell}</td>" for cell in cells)
        row = f'<th scope="row" {_CELL}>{trial.number}</th>{row}'
        rows += f"<tr{_RING if trial is best else ''}>{row}</tr>"
    inner = f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
    return markup.scroller(f'<table style="{_TABLE}">{inner}</table>', "Trials")


def _sparkline(trial: Trial, metric: str, last_step: int) -> str:
    """What a trial has reported, as a line: all have one axis of steps, each its own of values."""
    course = [(step, value) for step, value in trial.course if math.isfinite(value)]
    points, _ = thinned([step for step, _ in course], [value for _, value in course], 60)
    if not points:
        return NONE
    low, high = (pick(value for _, value in points) for pick in (min, max))
    high = high if high > low else low + (abs(low) or 1)
    x = svg.scale(svg.Axis(0, max(last_step, 1)), _EDGE, _WIDTH - _EDGE)
    y = svg.scale(svg.Axis(low, high), _HEIGHT - _EDGE, _EDGE)
    line = svg.polyline(points, x, y, 'stroke="currentColor"') + svg.markers(points[-1:], x, y)
    label = f"{len(course)} reports, the last {measured(metric, points[-1][1])}"
    return f'<div style="width:{_WIDTH}px">{svg.picture(line, _WIDTH, _HEIGHT, label)}</div>'


def _summary(progress: SweepProgress) -> list[str]:
    """How far a sweep is; its best trial, if one is done."""
    took = f"{progress.status}, {duration(progress.elapsed_s)}"
    if progress.status == "running" and progress.left_s is not None:
        took = f"about {duration(progress.left_s)} left"
    num_ended = sum(trial.state != "running" for trial in progress.trials)
    best = [f"Best: {_found(progress.best, progress)}"] if progress.best else []
    return [f"{plain(progress.name)}: {num_ended} of {progress.num_trials} trials, {took}", *best]


def _found(trial: Trial, progress: SweepProgress) -> str:
    """ "trial 7: accuracy 90 % with lr 0.01, width 64"."""
    value = f"{_shown(progress.metric)} {measured(progress.metric, trial.value)}"
    params = ", ".join(f"{_shown(name)} {_shown(value)}" for name, value in trial.params.items())
    return f"trial {trial.number}: {plain(trial.error) or value} with {params}"


def _shown(value: object) -> str:
    """A parameter, or a name, in one line that a column has room for."""
    return short_name(f"{value:.4g}" if isinstance(value, float) else plain(str(value)), 40)
