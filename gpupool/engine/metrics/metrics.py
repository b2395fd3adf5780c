"""Metrics that are exact over ranks, whatever share of the samples each has. Runs on engines.

Every rank adds up what it sees; that is put together once, at the end, and every rank then knows
the same values.

    metrics = make_metrics(["accuracy", "f1"], device)
    metrics.update(outputs, targets)          # of each share, if it has samples
    metrics.compute(world)                    # {'accuracy': 0.93, 'f1': 0.91}, on every rank
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpupool.core.errors import TrainingError
from gpupool.core.options.named_measures import check_metrics, name_of
from gpupool.data.reading.trees import map_tensors
from gpupool.engine.batches.form import main_output, part_of
from gpupool.engine.group.forming import World
from gpupool.engine.metrics.named import Summed, mean_of, named
from gpupool.engine.numerics.model_loss import NO_CLASS

Picked = Callable[[Any, Any], tuple[Any, Any]]


class Metrics:
    """Several metrics of one network, and what of (outputs, targets) each is computed of."""

    def __init__(self, entries: Mapping[str, tuple[Summed | _TorchMetric, Picked]]) -> None:
        self._entries = entries

    @property
    def names(self) -> tuple[str, ...]:
        """What was asked for; a collection of torchmetrics gives more values, by its own names."""
        return tuple(self._entries)

    def reset(self) -> None:
        """Forget everything: a pass over the data begins."""
        for metric, _ in self._entries.values():
            metric.reset()

    def update(self, outputs: Any, targets: Any) -> None:
        """Add what the network gave for samples, each of which comes once, on one rank."""
        with torch.no_grad():
            for metric, pick in self._entries.values():
                metric.update(*pick(outputs, targets))

    def compute(self, world: World) -> dict[str, float]:
        """The values over the samples of all ranks; every rank must call it, and gets the same.

        Raises TrainingError, on every rank, if one cannot be computed, or is not one number.
        """
        if not self._entries:
            return {}
        by_rank = world.gather({name: one.state() for name, (one, _) in self._entries.items()})
        values: dict[str, float] = {}
        problem: TrainingError | None = None
        for name, (metric, _) in self._entries.items():
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
    device: torch.device | str = "cpu",
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
    entries: dict[str, tuple[Summed | _TorchMetric, Picked]] = {}
    for name, metric, pick in _entries(asked, "", scored, lambda *halves: halves):
        if name in entries:
            raise TrainingError(
                f"metrics: there are two of the name {name!r}; wrap one in a function of another "
                "name."
            )
        if isinstance(metric, str):
            entries[name] = named(metric, ignored), pick
        else:
            made = _TorchMetric(metric, device) if _is_of_torchmetrics(metric) else mean_of(metric)
            entries[name] = made, pick
    return Metrics(entries)


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


class _TorchMetric:
    """A metric, or a collection, of torchmetrics, of which each rank has a part of the samples.

    torchmetrics would gather them itself, in the default process group, where ranks that do not
    train never answer, and with the defaults of ranks without samples.
    """

    def __init__(self, metric: Any, device: torch.device | str) -> None:
        self._metric, self._has_seen = metric.to(device), False
        # Those that have a state, in it; itself, if it is no wrapper or collection.
        self._parts = [part for part in metric.modules() if hasattr(part, "_reductions")]
        for part in self._parts:
            part.distributed_available_fn = lambda: False
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._metric.reset()
        self._has_seen = False

    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch."""
        self._metric.update(outputs, targets)
        self._has_seen = True

    def state(self) -> list[dict[str, Any]] | None:
        """Its states, on the CPU; None if it has seen nothing."""
        if not self._has_seen:
            return None
        return [
            {name: map_tensors(Tensor.cpu, getattr(part, name)) for name in part._reductions}
            for part in self._parts
        ]

    def merged(self, states: Sequence[list[dict[str, Any]]]) -> Any:
        """What it computes from the states of all ranks, put together as `Metric._sync_dist` does;
        it must have been updated here."""
        for part, of_ranks in zip(self._parts, zip(*states, strict=True), strict=True):
            for name, reduction in part._reductions.items():
                values = [state[name] for state in of_ranks]
                if isinstance(values[0], list):  # becomes that of one process
                    together: Any = [item for value in values for item in value]
                else:
                    together = torch.stack(values)
                    together = together if reduction is None else reduction(together)
                setattr(part, name, map_tensors(partial(Tensor.to, device=part.device), together))
        return map_tensors(Tensor.cpu, self._metric.compute())
