"""Have Optuna search a space, a trial on each rank. Runs on the client.

Only the notebook has the study, which it asks and tells: ranks get a plain dict.
"""

from __future__ import annotations

import inspect
import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from gpupool.core import current
from gpupool.core.errors import GpuPoolError, OptionsError, Pruned, SpmdError
from gpupool.core.formatting import measured, shortened, text_table
from gpupool.core.options import checks
from gpupool.pool.calls.presses import heard_by, ignore_for_a_moment
from gpupool.pool.pool import Pool
from gpupool.pool.session import current_pool
from gpupool.pool.tasks import Report, Task

if TYPE_CHECKING:
    import optuna

# As Optuna names them.
_SAMPLERS = {"tpe": "TPESampler", "gp": "GPSampler", "random": "RandomSampler"}
_SAMPLERS |= {"grid": "RandomSampler"}  # which has nothing left to draw
_PRUNERS = {None: "NopPruner", "median": "MedianPruner", "hyperband": "HyperbandPruner"}
_PRUNERS |= {"successive_halving": "SuccessiveHalvingPruner"}
_STATES = {"Pruned": "pruned", "KeyboardInterrupt": "stopped", "CancelledError": "stopped"}
_TRIED = 3  # so many trials, and one for each rank, have failed before all are given up
_KINDS = "give a list of values, a range of whole numbers, (low, high) or gpupool.log(low, high)"
Params = dict[str, Any]


# ---- what it may choose from ---------------------------------------------------------------------


class LogRange(NamedTuple):
    low: float
    high: float


def log(low: float, high: float) -> LogRange:
    """A range for a sweep: between 1e-5 and 1e-4 lie as many trials as between 1e-2 and 1e-1."""
    low = checks.number(above=0)("low", low)
    return LogRange(low, checks.number(above=low)("high", high))


def distributions(space: Any) -> dict[str, Any]:
    """The space as Optuna knows it. OptionsError: part of it is nothing to choose from."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(space, Mapping) or not space:
        raise OptionsError(f"space={space!r}: write {{'width': [64, 128]}}; for a name {_KINDS}.")
    found: dict[str, Any] = {}
    for name, values in space.items():
        if isinstance(values, tuple) and _is_interval(values):
            low, high = values
            found[name] = FloatDistribution(low, high, log=isinstance(values, LogRange))
        elif not isinstance(values, list | range) or not values:
            raise OptionsError(f"space[{name!r}]={values!r} is nothing to choose from: {_KINDS}.")
        elif isinstance(values, range):
            found[name] = IntDistribution(min(values), max(values), step=abs(values.step))
        elif all(isinstance(value, str | int | float | None) for value in values):
            found[name] = CategoricalDistribution(values)
        else:
            raise OptionsError(f"space[{name!r}]={values!r}: give words or numbers for its values.")
    return found


def _is_interval(values: tuple[Any, ...]) -> bool:
    are_numbers = all(isinstance(one, int | float) and math.isfinite(one) for one in values)
    return len(values) == 2 and are_numbers and values[0] < values[1]


def grid(space: Mapping[str, Any]) -> tuple[int, Iterator[Params]]:
    """How many combinations of values there are, and each of them."""
    if endless := [name for name, values in space.items() if isinstance(values, tuple)]:
        raise OptionsError(f"sampler='grid' tries all values: give a list for {endless[0]!r}.")
    rows = itertools.product(*space.values())
    return math.prod(map(len, space.values())), (dict(zip(space, row, strict=True)) for row in rows)


# ---- what is known of it -------------------------------------------------------------------------


@dataclass
class Trial:
    """One trial; its `state` is "running", "done", "pruned", "failed" or "stopped".

    `value` is of the metric, of a pruned trial the last; `course` what was reported of it, (step,
    value). `rank` is None in the notebook, and of trials of an earlier run. `error` is one line.
    """

    number: int
    params: Params
    state: str = "running"
    value: float | None = None
    course: list[tuple[int, float]] = field(default_factory=list)
    rank: int | None = None
    elapsed_s: float = 0.0
    error: str = ""


@dataclass
class SweepProgress:
    """How far a sweep is; its `status` is "running", "stopping", "finished" or "stopped". Its
    `num_trials` are with those of an earlier run. `left_s` is None where nobody knows."""

    name: str
    metric: str
    direction: str
    trials: list[Trial]
    num_trials: int
    elapsed_s: float = 0.0
    left_s: float | None = None
    status: str = "running"

    @property
    def best(self) -> Trial | None:
        done = [one for one in self.trials if one.state == "done"]
        choose = max if self.direction == "maximize" else min
        return choose(done, key=lambda one: one.value or 0.0, default=None)


@dataclass(frozen=True, repr=False)
class SweepResult:
    """What came of a sweep; `study` is Optuna's, for its plots and all else that it can do."""

    progress: SweepProgress
    study: optuna.Study

    @property
    def best(self) -> Trial | None:
        """The best trial, with its `params` and `value`; None if none is done."""
        return self.progress.best

    def table(self) -> list[dict[str, Any]]:
        """A row for each trial, as `pandas.DataFrame` takes them."""
        metric = self.progress.metric
        return [
            {"trial": one.number, "state": one.state, **one.params, metric: one.value}
            | {"seconds": one.elapsed_s, "rank": one.rank, "error": one.error}
            for one in self.progress.trials
        ]

    def __repr__(self) -> str:
        rows = self.table()
        lines = [list(row) for row in rows[:1]]
        for row in rows:
            lines.append(
                [measured(n, v) if isinstance(v, float | None) else str(v) for n, v in row.items()]
            )
        return f"Sweep {self.progress.name!r}, {self.progress.status}\n{text_table(lines)}"


# ---- how it runs ---------------------------------------------------------------------------------


def run_sweep(
    pool: Pool | None,
    objective: Callable[[Params], Any],
    space: Mapping[str, Any],
    *,
    trials: int | None,
    sampler: Any,
    pruner: Any,
    direction: str,
    metric: str | None,
    storage: str | os.PathLike[str] | None,
    name: str | None,
    seed: int | None,
    on: str,
    show: Callable[[SweepProgress], None],
) -> SweepResult:
    """What `gpupool.sweep` does; `show` is called here, several times a second and at the end."""
    __tracebackhide__ = True
    _check_objective(objective)
    checks.choose("direction", direction, ("minimize", "maximize"))
    checks.choose("on", on, ("ranks", "notebook"))
    checks.number(whole=True, least=0)("seed", 0 if seed is None else seed)
    if trials is not None or sampler != "grid":  # a grid has an end
        checks.number(whole=True, least=1)("trials", trials)
    with _quiet() as optuna:
        from gpupool.training import study as studies

        place = "" if storage is None else checks.folder("storage", storage)
        name, choices = name or "sweep", distributions(space)
        make_sampler = _maker("sampler", sampler, _SAMPLERS, optuna.samplers)
        make_pruner = _maker("pruner", pruner, _PRUNERS, optuna.pruners)
        num, rows = grid(space) if sampler == "grid" else (trials or 0, iter(()))
        study = studies.open_study(place, name, direction, metric, choices)
        pool = None if on == "notebook" else pool or current_pool(create=True)
        with studies.faults(place):
            # Not the draws of an earlier run once more.
            seed = None if seed is None else seed + len(study.trials)
            liar = {"constant_liar": True} if sampler == "tpe" else {}
            study.sampler, study.pruner = make_sampler(seed=seed, **liar), make_pruner()
            finished, todo = studies.earlier(study, rows)
            done, num = [_of_study(one) for one in finished], min(trials or num, num)
            progress = SweepProgress(name, metric or "value", direction, done, num)
            ask, tell = partial(studies.ask, study, choices, todo), partial(studies.tell, study)
            sweep = _Sweep(objective, metric, pruner is not None, ask, tell, progress, show)
            with heard_by(sweep.press):
                sweep.run(pool)
    if progress.status == "stopped":
        ignore_for_a_moment()
    if sweep.error is not None:
        raise sweep.error
    return SweepResult(progress, study)


def _check_objective(objective: Callable[[Params], Any]) -> None:
    checks.any_function("objective", objective)
    try:
        inspect.signature(objective).bind({})
    except TypeError:
        words = "write `def objective(params)`: it is called with a dict, as {'lr': 0.1}"
        raise OptionsError(f"objective takes other arguments than one; {words}.") from None
    except ValueError:  # of C: nobody knows what it takes
        pass


def _maker(what: str, value: Any, names: Mapping[Any, str], module: Any) -> Callable[..., Any]:
    """What makes the sampler or pruner of a name, or has the one that the user has made."""
    if isinstance(value, getattr(module, f"Base{what.capitalize()}")):
        return lambda **_: value
    if not isinstance(value, str | None) or value not in names:
        answer = checks.suggest(str(value), filter(None, names))
        raise OptionsError(f"{what}={value!r} is unknown. {answer}")
    return getattr(module, names[value])  # type: ignore[no-any-return]


def _of_study(one: optuna.trial.FrozenTrial) -> Trial:
    state = "done" if one.state.name == "COMPLETE" else "pruned"
    elapsed_s = one.duration.total_seconds() if one.duration else 0.0
    course = sorted(one.intermediate_values.items())
    return Trial(one.number, one.params, state, one.value, course, elapsed_s=elapsed_s)


@contextmanager
def _quiet() -> Iterator[Any]:
    """Optuna, which says nothing by itself meanwhile."""
    try:
        import optuna
    except ImportError:
        raise OptionsError("a sweep needs Optuna: pip install 'gpupool[sweep]'") from None
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield optuna
    finally:
        optuna.logging.set_verbosity(level)


@dataclass
class _Sweep:
    """A sweep that runs; `error` is to be raised at its end."""

    objective: Callable[[Params], Any]
    metric: str | None
    prunes: bool
    ask: Callable[[], Any]
    tell: Callable[[int, str, float | None], None]
    progress: SweepProgress
    show: Callable[[SweepProgress], None]
    _running: dict[Task, Trial] = field(default_factory=dict)
    _num_at_once: int = 1
    _began_at: float = field(default_factory=time.monotonic)
    _in_objective: bool = False  # in this thread
    _errors: list[BaseException] = field(default_factory=list)
    _has_worked: bool = False  # some trial
    error: BaseException | None = None

    def press(self, is_first: bool) -> None:
        """The user wants the end; by a second press at once."""
        self.progress.status = "stopping"
        if self._in_objective or not is_first:
            raise KeyboardInterrupt

    @property
    def _goes_on(self) -> bool:
        progress = self.progress
        return progress.status == "running" and len(progress.trials) < progress.num_trials

    def run(self, pool: Pool | None) -> None:
        """Have trials run until there are no more: on the ranks, or else in this thread."""
        progress, is_told = self.progress, False
        self._num_at_once = len(pool.training_ranks) if pool else 1
        try:
            while self._goes_on or self._running:
                while self._goes_on and len(self._running) < self._num_at_once:
                    self._begin(pool)
                ended = wait(self._running, 0.1, FIRST_COMPLETED).done
                self._update()
                for task in [task for task in self._running if task in ended]:
                    self._take(self._running.pop(task), task.result)
                if progress.status == "stopping" and not is_told:
                    is_told = True
                    self._interrupt()
            if progress.status == "running":
                progress.status = "finished"
        finally:  # also after an error, or a second press
            self._interrupt()
            if progress.status != "finished":
                progress.status = "stopped"
            left = [trial for trial in progress.trials if trial.state == "running"]
            for trial in left:
                trial.state = "stopped"
            with suppress(Exception):  # the storage may be what has failed
                for trial in left:
                    self.tell(trial.number, trial.state, None)
            self._update()

    def _interrupt(self) -> None:
        for task in self._running:
            task.interrupt()

    def _begin(self, pool: Pool | None) -> None:
        asked = self.ask()
        trial = Trial(asked.number, asked.params)
        self.progress.trials.append(trial)
        if pool is None:
            self._update()
            self._take(trial, partial(self._run_here, trial, asked))
            return

        def hear(report: Report) -> None:
            if self._hear(trial, asked, report.step, report.values):
                task.prune()

        task = pool.submit(self.objective, asked.params, retries=1, on_report=hear)
        self._running[task] = trial

    def _run_here(self, trial: Trial, asked: Any) -> Any:

        def hear(step: int, values: Mapping[str, float]) -> None:
            if self._hear(trial, asked, step, values):
                raise Pruned(f"after step {step}")

        before, began_at = current.trial.set(hear), time.monotonic()
        self._in_objective = True
        try:
            value = self.objective(asked.params)
            if self.progress.status == "stopping":  # so was a training in there
                raise KeyboardInterrupt
            return value
        finally:
            self._in_objective = False
            current.trial.reset(before)
            trial.elapsed_s = time.monotonic() - began_at

    def _hear(self, trial: Trial, asked: Any, step: int, values: Mapping[str, float]) -> bool:
        """Note what a trial reports; returns whether it is to be pruned."""
        names = list(values) if self.metric is None else [self.metric]
        value = values.get(names[0]) if len(names) == 1 else None
        # A trial that is tried again, as its rank has died, reports again.
        if value is None or (trial.course and step <= trial.course[-1][0]):
            return False
        trial.course.append((step, value))
        asked.report(value, step)
        return self.prunes and bool(asked.should_prune())

    def _take(self, trial: Trial, result: Callable[[], Any]) -> None:
        """Note what has come of a trial; end the sweep if others would do no better."""
        try:
            trial.value, trial.state = self._value_of(result()), "done"
        except (Exception, KeyboardInterrupt) as error:
            cause = error.first if isinstance(error, SpmdError) else error
            kind = getattr(cause, "ename", type(cause).__name__)
            trial.state = _STATES.get(kind, "failed")
            if trial.state == "failed":
                text = str(cause) if isinstance(error, GpuPoolError) else f"{kind}: {error}"
                trial.error = shortened(text)
                self._errors.append(error)
            elif trial.state == "stopped":  # by the pool's own button, say
                self.progress.status = "stopping"
            elif trial.course:
                trial.value = trial.course[-1][1]
        self.tell(trial.number, trial.state, trial.value)
        self._has_worked |= trial.state in ("done", "pruned")
        trials, name = self.progress.trials, self.metric or "value"
        num_tried = min(max(_TRIED, self._num_at_once), self.progress.num_trials)
        if not self._has_worked and len(self._errors) >= num_tried:
            self.error, self.progress.status = self._errors[0], "stopping"
        elif self.prunes and trial.state == "done" and not any(one.course for one in trials):
            how = f"call gpupool.report(step, {name}=...) in the objective"
            self.error = OptionsError(f"the pruner judges by reports of {name}: {how}.")
            self.progress.status = "stopping"

    def _value_of(self, returned: Any) -> float:
        if isinstance(returned, Mapping):
            returned = returned.get(self.metric, f"{returned} without {self.metric!r}")
        with suppress(TypeError, ValueError):
            if not math.isnan(value := float(returned)):
                return value
        raise OptionsError(f"the objective has returned {shortened(str(returned))}: no number.")

    def _update(self) -> None:
        progress = self.progress
        for task, trial in self._running.items():
            trial.rank, trial.elapsed_s = task.rank, task.elapsed_s
        progress.elapsed_s, progress.left_s = time.monotonic() - self._began_at, None
        lasted = [one.elapsed_s for one in progress.trials if one.state in ("done", "pruned")]
        if lasted and progress.status == "running":
            num_left = progress.num_trials - sum(t.state != "running" for t in progress.trials)
            progress.left_s = mean(lasted) * num_left / self._num_at_once
        self.show(progress)
