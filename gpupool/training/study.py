"""The study of a sweep, kept in a file, a data base or a store. Runs on the client."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import optuna
from optuna.distributions import distribution_to_json
from optuna.exceptions import OptunaError
from optuna.storages import BaseStorage, JournalStorage, journal
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from gpupool.core.errors import DataError, GpuPoolError, OptionsError
from gpupool.core.urls import without_passwords
from gpupool.data.stores.faults import without_secrets
from gpupool.data.stores.writable import Target

_DATABASES = {"sqlite", "mysql", "mariadb", "postgresql", "oracle", "mssql"}
_LOCKED_S = 3  # a notebook that was killed may have left its lock
_FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
_key = partial(json.dumps, sort_keys=True)  # of parameters
Params = dict[str, Any]


class StoreJournal(journal.BaseJournalBackend):
    """Optuna's journal in a folder of any store: an object for each batch of logs; one writer."""

    def __init__(self, url: str) -> None:
        self._target = Target(url)
        self._target.check()
        names = [name for name in self._target.names() if name.endswith(".jsonl")]
        self._num_objects = len(names)
        with ThreadPoolExecutor() as threads:
            texts = threads.map(self._target.get, names)
        self._lines = [line for text in texts for line in text.splitlines()]

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._lines[log_number_from:]]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = [json.dumps(log).encode() for log in logs]
        name = f"{self._num_objects:08}.jsonl"
        if not self._target.put(name, b"\n".join(lines), is_new=True):
            raise DataError(f"{self._target.name(name)}: another notebook runs this sweep", "other")
        self._num_objects += 1
        self._lines += lines


def open_study(
    place: str, name: str, direction: Any, metric: str | None, space: dict[str, Any]
) -> optuna.Study:
    """The study of this name, or the one that an earlier run has left; see `run_sweep`."""
    shapes = {name: distribution_to_json(one) for name, one in space.items()}
    wanted = {"space": shapes, "metric": metric, "direction": direction}
    with faults(place, Exception):
        study = optuna.create_study(
            storage=_storage(place), study_name=name, direction=direction, load_if_exists=True
        )
        if not study.user_attrs and not study.get_trials():
            study.set_user_attr("gpupool", wanted)
        kept = study.user_attrs.get("gpupool", {})
    for what, value in wanted.items():
        if kept.get(what) != value:
            there = f"storage={without_passwords(place)!r} has a sweep {name!r}"
            raise OptionsError(f"{there} with another {what}: give this one another name.")
    return study


def earlier(
    study: optuna.Study, grid: Iterator[Params]
) -> tuple[list[FrozenTrial], Iterator[Params]]:
    """The trials that an earlier run has finished; and the parameters of those that it has not, and
    that are tried again, before what is left of a grid."""
    finished, again, known = [], {}, set()
    for one in study.get_trials():
        params = one.system_attrs.get("fixed_params") or one.params
        if one.state is TrialState.RUNNING:  # the notebook was killed
            study.tell(one.number, state=TrialState.FAIL)
        if one.state in _FINISHED:
            finished.append(one)
        if one.state in _FINISHED or one.state is TrialState.WAITING:  # which comes next anyway
            known.add(_key(params))
        else:
            again[_key(params)] = params
    once_more = [params for key, params in again.items() if key not in known]
    known.update(again)
    left = (params for params in grid if _key(params) not in known)
    return finished, itertools.chain(once_more, left)


def ask(study: optuna.Study, space: dict[str, Any], todo: Iterator[Params]) -> optuna.Trial:
    if (params := next(todo, None)) is not None:
        study.enqueue_trial(params)
    return study.ask(space)


def tell(study: optuna.Study, number: int, state: str, value: float | None) -> None:
    """How a trial has ended: "done" with this value, "pruned", or in another way."""
    states = {"done": TrialState.COMPLETE, "pruned": TrialState.PRUNED}
    with suppress(RuntimeError):  # a sampler of the user's that has no more to try
        study.tell(number, value if state == "done" else None, states.get(state, TrialState.FAIL))


@contextmanager
def faults(place: str, *more: type[Exception]) -> Iterator[None]:
    """What a storage raises inside, as one sentence without a password."""
    kinds: tuple[type[Exception], ...] = (OSError, OptunaError, SQLAlchemyError, *more)
    try:
        yield
    except GpuPoolError:
        raise
    except kinds as error:
        text = without_secrets(str(error).strip().split("\n")[0], {}, place)
        shown = without_passwords(place)
        raise DataError(f"storage={shown!r} cannot be used: {text}", "other", shown) from None


def _storage(place: str) -> BaseStorage | str | None:
    scheme, is_url, _ = place.partition("://")
    if not place or scheme.partition("+")[0] in _DATABASES:
        return place or None
    if is_url:
        return JournalStorage(StoreJournal(place))
    path = os.path.expanduser(place)
    lock = journal.JournalFileSymlinkLock(path, grace_period=_LOCKED_S)
    return JournalStorage(journal.JournalFileBackend(path, lock_obj=lock))
