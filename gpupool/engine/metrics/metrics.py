"""Metrics that are exact over ranks, whatever share of the samples each has. Runs on engines.

They are those of torchmetrics. Every rank adds up what it sees; the sums are put together once, at
the end, and every rank then knows the same values.

    metrics = make_metrics(["accuracy", "f1"], device)
    metrics.update(outputs, targets)          # of each share, if it has samples
    metrics.compute(world)                    # {'accuracy': 0.93, 'f1': 0.91}, on every rank
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpupool.core.errors import TrainingError
from gpupool.core.options.named_measures import check_metrics, name_of
from gpupool.engine.batches.form import main_output, part_of
from gpupool.engine.group.forming import World
from gpupool.engine.metrics.named import Measured, mean_of, named
from gpupool.engine.metrics.torchmetrics import TorchMetric, looks_so
from gpupool.engine.numerics.class_loss import NO_CLASS

Picked = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A metric by name, and what it is computed of: `pick` (outputs, targets) -> the same."""

    name: str
    metric: Measured | TorchMetric
    pick: Picked


class Metrics:
    """Several metrics of one network, by name."""

    def __init__(self, entries: Sequence[_Entry] = ()) -> None:
        self._entries = tuple(entries)

    @property
    def names(self) -> tuple[str, ...]:
        """What was asked for; a collection of torchmetrics gives more values, by its own names."""
        return tuple(entry.name for entry in self._entries)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def reset(self) -> None:
        """Forget everything: a pass over the data begins."""
        for entry in self._entries:
            entry.metric.reset()

    def update(self, outputs: Any, targets: Any) -> None:
        """Add what the network gave for samples, each of which comes once, on one rank."""
        with torch.no_grad():
            for entry in self._entries:
                entry.metric.update(*entry.pick(outputs, targets))

    def compute(self, world: World) -> dict[str, float]:
        """The values over the samples of all ranks; every rank must call it, and gets the same.

        Raises TrainingError, on every rank, if one cannot be computed, or is not one number.
        """
        if not self._entries:
            return {}
        by_rank = world.gather([entry.metric.state() for entry in self._entries])
        computed: dict[str, float] = {}
        problem: TrainingError | None = None
        for entry, states in zip(self._entries, zip(*by_rank, strict=True), strict=True):
            seen = [rank for rank, state in enumerate(states) if state is not None]
            if not seen:
                computed[entry.name] = math.nan
            elif world.rank == seen[0]:  # once: sums in another order would differ in the last bit
                try:
                    found = entry.metric.merged([states[rank] for rank in seen])
                    computed |= _numbers(entry.name, found)
                except Exception as error:  # of the user's metric; raised again on every rank
                    text = f"the metric {entry.name!r} cannot be computed: {error}"
                    problem = problem or TrainingError(text)
        values: dict[str, float] = {}
        for found, wrong in world.gather((computed, problem)):
            if wrong is not None:
                raise wrong
            values |= found
        return values


def make_metrics(
    asked: Any,
    device: torch.device | str = "cpu",
    *,
    scored: Picked = lambda outputs, targets: (main_output(outputs), targets),
    ignored: int = NO_CLASS,
) -> Metrics:
    """The metrics that are meant.

    Args:
        asked: a name in `gpupool.core.options.named_measures.METRICS`, a function
            (outputs, targets) -> mean over the samples, any object or collection of
            torchmetrics, a sequence of these, or a dict
            {name of an output: one or several of them}, whose values are called "name/metric".
        scored: see `Loss.scored`: of several outputs, the one that is meant where none is named;
            functions get all.
        ignored: a class in targets that is left out by the metrics that have a name.

    Raises TrainingError for an unknown one, or two of the same name.
    """
    check_metrics(asked)
    entries = list(_entries(asked, "", scored, _everything, torch.device(device), ignored))
    names = [entry.name for entry in entries]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise TrainingError(
            f"metrics: there are two of the name {twice!r}; wrap one in a function of another name."
        )
    return Metrics(entries)


def _entries(
    asked: Any, prefix: str, pick: Picked, pick_all: Picked, device: torch.device, ignored: int
) -> Iterator[_Entry]:
    if isinstance(asked, str):
        yield _Entry(prefix + asked, named(asked, ignored), pick)
    # Before `callable`: objects of torchmetrics can be called too.
    elif looks_so(asked):
        yield _Entry(prefix + name_of(asked), TorchMetric(asked, device), pick)
    elif isinstance(asked, Mapping):
        for output, metrics in asked.items():
            of_it = partial(_of_output, output)
            yield from _entries(metrics, f"{prefix}{output}/", of_it, of_it, device, ignored)
    elif callable(asked):
        yield _Entry(prefix + name_of(asked), mean_of(asked), pick_all)
    else:
        for metric in asked:
            yield from _entries(metric, prefix, pick, pick_all, device, ignored)


def _everything(outputs: Any, targets: Any) -> tuple[Any, Any]:
    return outputs, targets


def _of_output(name: Any, outputs: Any, targets: Any) -> tuple[Any, Any]:
    if not isinstance(targets, Tensor):
        targets = part_of(targets, name, "the targets")
    return main_output(part_of(outputs, name)), targets


def _numbers(name: str, found: Any) -> dict[str, float]:
    """Values by name; of several, those that are no single number are left out."""
    if isinstance(found, Mapping):
        output = name.rpartition("/")[0]
        prefix = f"{output}/" if output else ""
        return {prefix + str(k): float(v) for k, v in found.items() if _is_number(v)}
    if not _is_number(found):
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise TrainingError(f"it gives {shape}, not one number; let it average, or take one.")
    return {name: float(found)}


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (int, float))
