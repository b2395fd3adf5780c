"""`gpupool.sweep`: search a space of parameters, and show it where the user is. Client."""

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
from gpupool.notebook.monitor import plots
from gpupool.notebook.monitor.curves import Curve
from gpupool.notebook.page import markup
from gpupool.notebook.page.front_end import Place, has_reader, in_notebook
from gpupool.notebook.pool_bar import interrupt_button
from gpupool.training.sweep import SweepProgress, SweepResult, Trial, run_sweep

REDRAW_EVERY_S = 0.5
MAX_ROWS = 100  # they are drawn again and again
_OVER = ("finished", "stopped")
_COLOURS = {"running": markup.AMBER, "done": markup.GREEN, "failed": markup.RED}
_HEAD = "display:flex;flex-wrap:wrap;align-items:center;gap:4px 12px;font-weight:600"
_ERROR = "min-width:12em;overflow-wrap:anywhere"
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
        is_over, summary = progress.status in _OVER, _summary(progress)
        ended = {trial.number: trial for trial in progress.trials if trial.state != "running"}
        told = self._told if self._told is not None else {*ended}  # those of an earlier run
        new, self._told = [ended[n] for n in ended if n not in told], {*ended}
        lines = [f"{_found(t, progress)}; {t.state} in {duration(t.elapsed_s)}" for t in new]
        lines += summary if is_over else []
        if lines and (self._place is None or not has_reader()):
            write_line("\n".join(lines), sys.stdout)
        now = time.monotonic()
        if self._place and (is_over or now - self._drawn_at >= REDRAW_EVERY_S):
            self._drawn_at, text = now, "\n".join(summary)
            self._place.show({"text/html": sweep_html(progress), "text/plain": text})


def result_html(result: SweepResult) -> str:
    return sweep_html(result.progress)


def sweep_html(progress: SweepProgress) -> str:
    """Complete without scripts. Where the pool has a bar, that fills the place of a button."""
    headline, *words = (f"<div>{escape(line)}</div>" for line in _summary(progress))
    trials = progress.trials
    if progress.status not in _OVER:
        share = sum(trial.state != "running" for trial in trials) / progress.num_trials
        headline += markup.progress(share, "Trials") + interrupt_button()
    # If these are too many: the best, and the last.
    drawn = [trial for trial in trials[:-MAX_ROWS] if trial is progress.best] + trials[-MAX_ROWS:]
    rest = f"{len(trials) - len(drawn)} more trials are not drawn; table() of the result has them."
    more = markup.muted(rest) if len(drawn) < len(trials) else ""
    return markup.card(
        f'<div style="{_HEAD}">{headline}</div>', *words, _table(drawn, progress), more
    )


def _table(trials: Sequence[Trial], progress: SweepProgress) -> str:
    if not trials:
        return ""
    names = list(dict.fromkeys(name for trial in trials for name in trial.params))
    header = ["trial", "state", *names, progress.metric, "course", "time", "rank"]
    last_step = max((step for trial in trials for step, _ in trial.course), default=0)
    rows = []
    for trial in trials:
        state = markup.badge(trial.state, _COLOURS.get(trial.state, markup.GREY))
        state += markup.badge("best", markup.GREEN) if trial is progress.best else ""
        if trial.error:
            state += f'<div style="{_ERROR}">{escape(plain(trial.error))}</div>'
        params = [_shown(trial.params.get(name, NONE)) for name in names]
        row = [str(trial.number), markup.Html(state), *params]
        row += [measured(progress.metric, trial.value)]
        row += [markup.Html(_sparkline(trial, progress.metric, last_step))]
        row += [duration(trial.elapsed_s), NONE if trial.rank is None else str(trial.rank)]
        rows.append(row)
    style = ";vertical-align:top;font-variant-numeric:tabular-nums"
    return markup.scroller(markup.table([*map(_shown, header)], rows, style), "Trials")


def _sparkline(trial: Trial, metric: str, last_step: int) -> str:
    """What a trial has reported, as a line: all have one axis of steps, each its own of values."""
    curve = Curve(max_points=60)
    curve.extend(dict(trial.course))
    points = curve.points()
    if not points:
        return NONE
    low, high = (pick(value for _, value in points) for pick in (min, max))
    high = high if high > low else low + (abs(low) or 1)
    x = plots.scale(plots.Axis(0, max(last_step, 1)), _EDGE, _WIDTH - _EDGE)
    y = plots.scale(plots.Axis(low, high), _HEIGHT - _EDGE, _EDGE)
    line = plots.polyline(points, x, y, 'stroke="currentColor"') + plots.markers(points[-1:], x, y)
    label = f"{curve.num_points} reports, the last {measured(metric, points[-1][1])}"
    return f'<div style="width:{_WIDTH}px">{plots.picture(line, _WIDTH, _HEIGHT, label)}</div>'


def _summary(progress: SweepProgress) -> list[str]:
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
