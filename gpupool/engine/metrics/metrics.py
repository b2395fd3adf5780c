"""Metrics that are exact over ranks, whatever share of the samples each has. Runs on engines.

Every rank adds up what it sees; that is put together once, at the end, and every rank then knows
the same values.

    metrics = make_metrics(["accuracy", "f1"])
    metrics.update(outputs, targets)          # of each share, if it has samples
    metrics.compute(world)                    # {'accuracy': 0.93, 'f1': 0.91}, on every rank
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpupool.core.errors import TrainingError
from gpupool.core.options.datasets import NO_CLASS
from gpupool.core.options.named_measures import check_metrics, name_of
from gpupool.data.reading.trees import first_tensor
from gpupool.engine.batches.form import main_output, part_of
from gpupool.engine.group.forming import World
from gpupool.engine.metrics.named import named
from gpupool.engine.metrics.states import MeanOf, OfTorchmetrics
from gpupool.engine.numerics.losses import side_by_side

Picked = Callable[[Any, Any], tuple[Any, Any]]


class Metrics:
    """Several metrics of one network, by name."""

    def __init__(self, entries: Mapping[str, MeanOf | OfTorchmetrics]) -> None:
        self._entries = entries

    @property
    def names(self) -> tuple[str, ...]:
        """What was asked for; a collection of torchmetrics gives more values, by its own names."""
        return tuple(self._entries)

    def reset(self) -> None:
        """Forget everything: a pass over the data begins."""
        for metric in self._entries.values():
            metric.reset()

    def update(self, outputs: Any, targets: Any) -> None:
        """Add what the network gave for samples, each of which comes once, on one rank."""
        with torch.no_grad():
            for metric in self._entries.values():
                metric.update(outputs, targets)

    def compute(self, world: World) -> dict[str, float]:
        """The values over the samples of all ranks; every rank must call it, and gets the same.

        Raises TrainingError, on every rank, if one cannot be computed, or is not one number.
        """
        if not self._entries:
            return {}
        by_rank = world.gather({name: one.state() for name, one in self._entries.items()})
        values: dict[str, float] = {}
        problem: TrainingError | None = None
        for name, metric in self._entries.items():
            seen = [rank for rank, states in enumerate(by_rank) if states[name] is not None]
            if not seen:
                values[name] = math.nan
            elif world.rank == seen[0]:  # only one that has seen samples can, of torchmetrics
                try:
                    values |= _numbers(name, metric.merged([by_rank[rank][name] for rank in seen]))
                except Exception as error:  # of the user's metric; raised again on every rank
                    problem = TrainingError(f"the metric {name!r} cannot be computed: {error}")
        found = world.gather((values, problem))
        for _, wrong in found:
            if wrong is not None:
                raise wrong
        return {name: value for values, _ in found for name, value in values.items()}


def make_metrics(
    asked: Any,
    *,
    scored: Picked = lambda outputs, targets: (main_output(outputs), targets),
    ignored: int = NO_CLASS,
) -> Metrics:
    """The metrics that are meant by names, functions, or objects of torchmetrics.

    Those of a dict {name of an output: one or several of these} are called "name/metric".

    Args:
        scored: see `Loss.scored`: of several outputs, the one that is meant where none is named;
            functions get all.
        ignored: a class in targets that is left out by the metrics that have a name.

    Raises TrainingError for an unknown one, or two of the same name.
    """
    check_metrics(asked)
    entries: dict[str, MeanOf | OfTorchmetrics] = {}
    for name, metric, pick in _entries(asked, "", scored, lambda *halves: halves):
        if name in entries:
            raise TrainingError(
                f"metrics: there are two of the name {name!r}; wrap one in a function of another "
                "name."
            )
        if isinstance(metric, str):
            entries[name] = named(metric, pick, ignored)
        elif _is_of_torchmetrics(metric):
            entries[name] = _itself(metric, pick)
        else:
            entries[name] = mean_of(metric, pick)
    return Metrics(entries)


def mean_of(function: Callable[[Any, Any], Any], pick: Picked) -> MeanOf:
    """A function (outputs, targets) -> mean over the samples of a batch."""

    def sums(outputs: Any, targets: Any) -> tuple[Tensor, int]:
        outputs, targets = pick(outputs, targets)
        first = first_tensor(targets)
        num = 1 if first is None or not first.ndim else len(first)
        with side_by_side(outputs, targets):
            value = torch.as_tensor(function(outputs, targets), dtype=torch.float64)
        return value * num, num

    return MeanOf(sums)


def _itself(metric: Any, pick: Picked) -> OfTorchmetrics:
    return OfTorchmetrics(lambda num: metric, lambda *halves: (*pick(*halves), 0))


def _entries(
    asked: Any, prefix: str, pick: Picked, pick_all: Picked
) -> Iterator[tuple[str, Any, Picked]]:
    if isinstance(asked, str) or _is_of_torchmetrics(asked):
        yield prefix + name_of(asked), asked, pick
    elif isinstance(asked, Mapping):
        for output, metrics in asked.items():
            of_it = partial(_of_output, output)
            yield from _entries(metrics, f"{prefix}{output}/", of_it, of_it)
    elif callable(asked):
        yield prefix + name_of(asked), asked, pick_all
    else:
        for metric in asked:
            yield from _entries(metric, prefix, pick, pick_all)


def _of_output(name: Any, outputs: Any, targets: Any) -> tuple[Any, Any]:
    if not isinstance(targets, Tensor):
        targets = part_of(targets, name, "the targets")
    return main_output(part_of(outputs, name)), targets


def _numbers(name: str, found: Any) -> dict[str, float]:
    """Values by name; of several, those that are no single number are left out."""
    if isinstance(found, Mapping):
        prefix = name[: name.rfind("/") + 1]  # of the output
        return {f"{prefix}{key}": float(one) for key, one in found.items() if _is_number(one)}
    if not _is_number(found):
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise TrainingError(f"it gives {shape}, not one number; let it average, or take one.")
    return {name: float(found)}


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (int, float))


def _is_of_torchmetrics(metric: object) -> bool:
    """Whether it looks so: torchmetrics is not imported for that."""
    return isinstance(metric, nn.Module) and all(
        callable(getattr(metric, name, None)) for name in ("update", "compute", "reset")
    )
