"""What of a batch the network is called with, and what the loss gets. Runs on engines.

    form = form_of(model, loss, options)
    inputs, targets = form.halves(batch.inputs, batch.targets)
    outputs = called(model, inputs)
    loss(outputs, targets)

Batches come as pairs, as rows with named columns, or as the user's `collate` makes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gpupool.core.errors import DataError, TrainingError
from gpupool.core.options.datasets import LABELS
from gpupool.core.options.model_facts import UNKNOWN, Parameters, forward_parameters
from gpupool.core.options.training_options import TrainingOptions
from gpupool.data.reading.trees import first_tensor

_MAIN = ("out", "logits")  # torchvision's segmentation and GoogLeNet; Hugging Face


class Keywords(dict[str, Any]):
    """Inputs that a network is called with by name."""


class Positions(tuple[Any, ...]):
    """Inputs that a network is called with one after the other."""

    __slots__ = ()


def called(network: nn.Module, inputs: Any) -> Any:
    """What the network gives for inputs of `BatchForm.halves`."""
    if isinstance(inputs, Keywords):
        return network(**inputs)
    return network(*inputs) if isinstance(inputs, Positions) else network(inputs)


@dataclass(frozen=True)
class BatchForm:
    """How batches become inputs and targets; `inputs` and `targets` as in `TrainingOptions`.

    `parameters` are those of the network's `forward`. `gives_loss`: the network computes the loss.
    `needs_target`: the loss cannot do with all of a batch.
    """

    inputs: str | Sequence[str | int] = "auto"
    targets: str | int = "auto"
    parameters: Parameters = UNKNOWN
    gives_loss: bool = False
    needs_target: bool = False

    def halves(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """What the network is called with, see `called`, and what the loss gets. Raises DataError
        if the batch has no such parts."""
        is_pair = targets is not None
        batch = (inputs, targets) if is_pair else inputs
        if self.targets == "batch":
            offered, target = inputs, batch
        elif self.targets != "auto":
            place = targets if has_part(targets, self.targets) else batch
            target = part_of(place, self.targets, "the batch")
            offered = inputs if is_pair else _without(batch, self.targets)
        else:
            offered, target = (inputs, targets) if is_pair else self._split(batch)
        if self.inputs != "auto":
            has_all = all(has_part(inputs, name) for name in self.inputs)
            place = inputs if has_all else batch
            parts = [part_of(place, name, "the batch") for name in self.inputs]
            if all(map(self._accepts, self.inputs)):
                chosen: Any = Keywords(zip(map(str, self.inputs), parts, strict=True))
            else:
                chosen = parts[0] if len(parts) == 1 else Positions(parts)
        elif is_pair and self.gives_loss and self._takes_both():
            return Positions(batch), batch
        else:
            chosen = self._chosen(offered, is_pair)
        used = list(chosen.values()) if isinstance(chosen, Mapping) else chosen
        for part in [*used, target] if isinstance(used, (list, tuple)) else [target]:
            if isinstance(part, DataError):  # it stands for a column that cannot be collated
                raise part
        return chosen, target

    def _takes_both(self) -> bool:
        """Whether a network gives the loss of a pair, as torchvision's for detection and nanoGPT,
        forward(inputs, targets=None)."""
        return any(name in LABELS for name in self.parameters.names[1:2])

    def _split(self, batch: Any) -> tuple[Any, Any]:
        if isinstance(batch, Mapping):
            label = label_of(batch)
            if label is not None and len(batch) > 1:
                return batch, label
            if self.needs_target:
                raise _unclear(f"{_names(batch)} and no single {', '.join(LABELS)}", "no target")
            return batch, batch
        is_sequence = isinstance(batch, (list, tuple)) and first_tensor(batch) is not None
        if self.inputs != "auto" or not is_sequence:  # a tensor, or an object of the user's
            return batch, batch
        if len(batch) == 1:
            return batch[0], batch[0]
        raise _unclear(f"{len(batch)} parts", "no pair")

    def _chosen(self, offered: Any, is_pair: bool) -> Any:
        """Of columns: those that the network takes by name, the only one, or all as one dict."""
        required = self.parameters.required
        if not isinstance(offered, Mapping):
            is_many = isinstance(offered, (list, tuple)) and 1 < len(required) == len(offered)
            return Positions(offered) if is_many else offered
        others = offered
        if not is_pair:
            others = {n: part for n, part in offered.items() if n not in LABELS} or offered
        if self.targets == "batch":
            # Columns of data sets are called "label"; networks of Hugging Face take `labels`.
            label = label_of(offered)
            adds = label is not None and "labels" not in offered and self._accepts("labels")
            offered = {**offered, "labels": label} if adds else offered
        else:
            offered = others
        taken = {name: part for name, part in offered.items() if self._accepts(name)}
        if taken and set(required) <= set(taken):
            return Keywords(taken)
        if len(required) > 1:
            wanted = f"{_names(offered)}, and the network takes {', '.join(required)}"
            raise _unclear(wanted, "no columns")
        return next(iter(others.values())) if len(others) == 1 and not is_pair else offered

    def _accepts(self, name: object) -> bool:
        found = self.parameters
        is_any = found.any_name and isinstance(name, str) and name != "label"
        return is_any or name in found.names


PLAIN = BatchForm()
"""Where nobody knows the network: pairs as they are, rows as pairs of columns."""


def form_of(model: nn.Module, loss: Any, options: TrainingOptions) -> BatchForm:
    """How the batches of a training, or of an evaluation, are used by its network and its loss."""
    gives_loss = loss is None or (isinstance(loss, str) and loss == "output")
    return BatchForm(
        inputs=options.inputs,
        targets="batch" if gives_loss or _takes_batch(loss) else options.targets,
        parameters=forward_parameters(model),
        gives_loss=gives_loss,
        needs_target=isinstance(loss, str),
    )


def _takes_batch(loss: Any) -> bool:
    """Whether a function (outputs, batch) has called its second argument so."""
    if isinstance(loss, (str, nn.Module)):
        return False
    try:
        return list(inspect.signature(loss).parameters)[1:2] == ["batch"]
    except (TypeError, ValueError):  # a function written in C
        return False


def _without(batch: Any, name: str | int) -> Any:
    """The other parts of a batch; the only one, if there is only one."""
    if isinstance(batch, Mapping):
        return {other: part for other, part in batch.items() if other != name}
    if isinstance(batch, (list, tuple)) and isinstance(name, int):
        others = [part for place, part in enumerate(batch) if place != name % len(batch)]
        return others[0] if len(others) == 1 else others
    return batch


def _names(batch: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, batch))


def _unclear(there: str, kind: str) -> DataError:
    return DataError(
        f"a batch has {there}: say which of them the network gets, and which is the target, by "
        "names or numbers, as train(..., inputs=(0, 1), targets=2).",
        kind,
    )


# ---- parts by name or number, of batches and of outputs ------------------------------------------


def label_of(batch: Any) -> Any:
    """The one column of labels of a batch with named columns; None if it has none, or several."""
    names = [name for name in LABELS if isinstance(batch, Mapping) and name in batch]
    return batch[names[0]] if len(names) == 1 else None


def main_output(outputs: Any) -> Any:
    """What a network is about, of outputs with more in them: see `_MAIN`."""
    found = [] if isinstance(outputs, Tensor) else [n for n in _MAIN if has_part(outputs, n)]
    return part_of(outputs, found[0]) if found else outputs


def has_part(tree: Any, name: Any) -> bool:
    if isinstance(tree, Mapping):
        return name in tree
    if isinstance(name, int):
        return isinstance(tree, (list, tuple)) and -len(tree) <= name < len(tree)
    return isinstance(tree, tuple) and name in getattr(tree, "_fields", ())


def part_of(tree: Any, name: Any, what: str = "the outputs of the network") -> Any:
    """Raises TrainingError, with the names there are, if this is none of them."""
    if not has_part(tree, name):
        names = tree if isinstance(tree, Mapping) else getattr(tree, "_fields", None)
        if names is None and isinstance(tree, (list, tuple)):
            names = range(len(tree))
        there = f"only {', '.join(map(repr, names))}" if names else f"are a {type(tree).__name__}"
        raise TrainingError(f"{what} have no {name!r}: {there}.")
    by_name = isinstance(tree, tuple) and not isinstance(name, int)
    return getattr(tree, name) if by_name else tree[name]
