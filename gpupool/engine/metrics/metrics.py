"""Metrics that are exact over ranks, whatever share of the samples each has. Runs on engines.

Every rank adds up what it sees; that is put together once, at the end, and every rank then knows
the same values.

Accuracy and functions of the user's are means of sums. All others are torchmetrics', which takes
seconds to import.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpupool.core.errors import TrainingError
from gpupool.core.options.datasets import NO_CLASS
from gpupool.core.options.named_measures import check_metrics, name_of
from gpupool.data.reading.trees import first_tensor, map_tensors
from gpupool.engine.batches.form import main_output, part_of
from gpupool.engine.group.forming import World
from gpupool.engine.numerics.losses import (
    aligned,
    classes_first,
    fits_first,
    only_output,
    side_by_side,
)

_ACCURACIES = ("accuracy", "pixel_accuracy", "token_accuracy")  # of samples, pixels, tokens
_OF_NUMBERS = ("mse", "rmse", "mae", "r2")
_OF_SCORES = ("top5", "auc", "perplexity")  # others need the likeliest class alone

Number = float | Tensor
Picked = Callable[[Any, Any], tuple[Any, Any]]


class Metrics:
    def __init__(self, entries: Mapping[str, MeanOf | OfTorchmetrics]) -> None:
        self._entries = entries

    @property
    def names(self) -> tuple[str, ...]:
        """What was asked for; a collection of torchmetrics gives more values, by its own names."""
        return tuple(self._entries)

    def reset(self) -> None:
        for metric in self._entries.values():
            metric.reset()

    def update(self, outputs: Any, targets: Any) -> None:
        """Add what the network gave for samples, each of which comes once, on one rank."""
        with torch.no_grad():
            for metric in self._entries.values():
                metric.update(outputs, targets)

    def compute(self, world: World) -> dict[str, float]:
        """The values over the samples of all ranks; every rank must call it, and gets the same.
        Raises TrainingError, on every rank, if one cannot be computed, or is not one number."""
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

    Those of a dict {name of an output: one or several of these} are called "name/metric". Where no
    output is named, `scored` chooses, see `Loss`; functions get all. The class that is `ignored` is
    left out by the metrics that have a name.

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
            entries[name] = _named(metric, pick, ignored)
        elif _is_of_torchmetrics(metric):
            entries[name] = _itself(metric, pick)
        else:
            entries[name] = _mean_of(metric, pick)
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


# ---- what each keeps of the samples of a rank ---------------------------------------------------


class MeanOf:
    """A mean, of what `sums` gives for a batch: a sum, and over how much it is."""

    def __init__(self, sums: Callable[[Any, Any], tuple[Number, Number]]) -> None:
        self._sums = sums
        self.reset()

    def reset(self) -> None:
        self._seen: Any = None

    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch; nothing is read from the device."""
        total, num = self._sums(outputs, targets)
        total = torch.as_tensor(total, dtype=torch.float64)
        pair = torch.stack([total, total.new_full((), 1) * num])
        self._seen = pair if self._seen is None else self._seen + pair

    def state(self) -> Tensor | None:
        return None if self._seen is None else self._seen.cpu()

    def merged(self, states: Sequence[Tensor]) -> Any:
        total, num = torch.stack(list(states)).sum(0)
        return total / num


class OfTorchmetrics:
    """A metric, or a collection, of torchmetrics, of which each rank has a part of the samples.

    torchmetrics would gather them itself, in the default process group, where ranks that do not
    train never answer, and with the defaults of ranks without samples.

    `make` gives the metric, for so many classes: only a batch shows how many there are. `rows`
    gives what it takes of (outputs, targets), and the number of classes; None if nothing.
    """

    def __init__(
        self, make: Callable[[int], Any], rows: Callable[[Any, Any], tuple[Any, Any, int] | None]
    ) -> None:
        self._make, self._rows = make, rows
        self._metric: Any = None
        self._has_seen = False

    def reset(self) -> None:
        if self._metric is not None:
            self._metric.reset()
        self._has_seen = False

    def update(self, outputs: Any, targets: Any) -> None:
        rows = self._rows(outputs, targets)
        if rows is None:
            return
        found, actual, num = rows
        if self._metric is None:
            first = first_tensor(found)
            self._metric = self._make(num).to("cpu" if first is None else first.device)
            # Those that have a state, in it; itself, if it is no wrapper or collection.
            self._parts = [one for one in self._metric.modules() if hasattr(one, "_reductions")]
            for part in self._parts:
                part.distributed_available_fn = lambda: False
            self._metric.reset()
        self._metric.update(found, actual)
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


def _mean_of(function: Callable[[Any, Any], Any], pick: Picked) -> MeanOf:
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


# ---- those that have a name ---------------------------------------------------------------------


def _named(name: str, pick: Picked, ignored: int) -> MeanOf | OfTorchmetrics:
    def right(outputs: Any, targets: Any) -> tuple[Tensor, int]:
        found, actual, _ = labelled(*pick(outputs, targets), ignored, likeliest)
        return (found[:, 0] == actual).sum(), len(actual)

    def rows(outputs: Any, targets: Any) -> tuple[Tensor, Tensor, int] | None:
        outputs, targets = pick(outputs, targets)
        if name in _OF_NUMBERS:
            pair = aligned(only_output(outputs).detach().double(), targets)
            by_number = int(name == "r2" and pair[0].ndim > 1)  # its mean over those of a sample
            return pair[0].flatten(by_number), pair[1].flatten(by_number), 0
        find = (lambda scores: scores) if name in _OF_SCORES else likeliest
        found, actual, num = labelled(outputs, targets, ignored, find)
        if name == "auc":
            found = found.double().softmax(1)
        elif name == "perplexity":
            found, actual = found.double()[None], actual[None]
        one_each = name not in _OF_SCORES or (name == "auc" and num == 2)
        return (found[:, -1] if one_each else found, actual, num) if actual.numel() else None

    if name in _ACCURACIES:
        return MeanOf(right)
    import torchmetrics  # noqa: F401  (seconds, for which the first validation would be blamed)

    return OfTorchmetrics(partial(_made, name), rows)


def _made(name: str, num: int) -> Any:
    """The metric of torchmetrics, for `num` classes; means of these are over those that occur."""
    from torchmetrics import classification, regression, text

    classes: dict[str, Any] = {"num_classes": num, "validate_args": False}  # `labelled` has looked
    makes: dict[str, Callable[..., Any]] = {
        "top5": partial(classification.MulticlassAccuracy, top_k=min(5, num), average="micro"),
        "precision": classification.MulticlassPrecision,
        "recall": classification.MulticlassRecall,
        "f1": classification.MulticlassF1Score,
        "mean_iou": classification.MulticlassJaccardIndex,
        "auc": classification.MulticlassAUROC,
        "perplexity": text.Perplexity,
        "mse": regression.MeanSquaredError,
        "rmse": partial(regression.MeanSquaredError, squared=False),
        "mae": regression.MeanAbsoluteError,
        "r2": regression.R2Score,
    }
    if name == "auc" and num == 2:
        return classification.BinaryAUROC()
    settings = {} if name in (*_OF_NUMBERS, "perplexity") else classes
    return makes[name](**settings).set_dtype(torch.float64)


def labelled(
    outputs: Any, targets: Any, ignored: int, find: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, int]:
    """For each target that is a class a row of what `find` makes of scores, (N, any number, ...),
    and that class; and how many classes there are.

    Outputs (N, C, ...), or (N, ..., C) as of text, are scores of C classes; without that dimension,
    or with C = 1, they are logits of the second of two. Targets are (N, ...). Raises TrainingError
    for shapes that do not fit, and a class that the network does not know.
    """
    scores, targets = classes_first(only_output(outputs), targets).detach(), only_output(targets)
    if not fits_first(scores, targets):
        if scores.ndim > 1 and scores.shape[1] == 1:
            scores = scores.squeeze(1)
        if targets.ndim > scores.ndim and targets.shape[1] == 1:
            targets = targets.squeeze(1)
        if scores.shape != targets.shape or scores.ndim == 2:
            raise TrainingError(
                f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)} are not scores "
                "of classes and classes: a metric of classes needs (N, C, ...) and (N, ...)."
            )
        scores = torch.stack([torch.zeros_like(scores), scores], 1)
    num, found = scores.shape[1], find(scores).movedim(1, -1).flatten(0, -2)
    counts = targets.flatten() != ignored
    found, actual = found[counts], targets.flatten()[counts].round().long()
    if len(actual) and not 0 <= int(actual.min()) <= int(actual.max()) < num:
        wrong = sorted(set(actual.tolist()) - set(range(num)))[:3]
        raise TrainingError(
            f"the targets have class {', '.join(map(str, wrong))}, the network has {num} outputs: "
            f"classes are 0 to {num - 1}."
        )
    return found, actual, num


def likeliest(scores: Tensor) -> Tensor:
    """The class with the highest score, (N, 1, ...): a `find` of `labelled`."""
    return scores.argmax(1, keepdim=True)
