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
from typing import Any, Literal

from torch import nn

from gpupool.core.errors import DataError
from gpupool.core.options.model_facts import Parameters, forward_parameters
from gpupool.core.options.training_options import TrainingOptions
from gpupool.data.reading.trees import first_tensor
from gpupool.engine.batches.trees import has_part, part_of

LABELS = ("label", "labels", "target", "targets")  # columns of rows

# When the loss gets the whole batch: always; of a batch that is no pair; of one that is no pair and
# has no column of labels; or never, so that such a batch is an error.
Whole = Literal["always", "no pair", "no label", "never"]


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


def label_of(batch: Any) -> Any:
    """The one column of labels of a batch with named columns; None if it has none, or several."""
    names = [name for name in LABELS if isinstance(batch, Mapping) and name in batch]
    return batch[names[0]] if len(names) == 1 else None


@dataclass(frozen=True)
class BatchForm:
    """How batches become inputs and targets; `inputs` and `targets` as in `TrainingOptions`.

    `parameters` are those of the network's `forward`, None if they are not known.
    """

    inputs: str | Sequence[str | int] = "auto"
    targets: str | int = "auto"
    whole: Whole = "no label"
    parameters: Parameters | None = None
    gives_loss: bool = False
    """Whether the network computes the loss."""

    def halves(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """What the network is called with, see `called`, and what the loss gets.

        Raises DataError if the batch has no such parts.
        """
        is_pair = targets is not None
        batch = (inputs, targets) if is_pair else inputs
        named = () if isinstance(self.inputs, str) else self.inputs
        if is_pair and not all(has_part(inputs, name) for name in named):
            inputs = batch  # numbers of its two halves
        if self.whole == "always":
            # Of a pair the network gets the inputs, and also the targets if it computes the loss of
            # them; it may want the labels of anything else.
            if is_pair and self.gives_loss and self._takes_two(inputs):
                return Positions(batch), batch
            return self._inputs(inputs, is_pair=is_pair, takes_labels=not is_pair), batch
        if self.targets != "auto":
            place = targets if has_part(targets, self.targets) else batch
            target = _sound(part_of(place, self.targets, "the batch"))
            if not is_pair and self.inputs == "auto":
                inputs = _without(inputs, self.targets)
            return self._inputs(inputs, is_pair=is_pair), target
        if is_pair:
            return self._inputs(inputs, is_pair=True), targets
        if isinstance(inputs, Mapping):
            return self._of_columns(inputs)
        return self._of_parts(inputs)

    def _takes_two(self, inputs: Any) -> bool:
        """Whether the network wants inputs and targets, one after the other."""
        found = self.parameters
        has_two = isinstance(inputs, (list, tuple, Mapping)) and len(inputs) == 2
        if self.inputs != "auto" or found is None:
            return self.inputs == "args"
        # torchvision's networks for detection and nanoGPT are forward(inputs, targets=None).
        may_take_targets = any(name in LABELS for name in found.names[1:2])
        return may_take_targets or (len(found.required) == 2 and not has_two)

    def _of_columns(self, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        labels = [name for name in LABELS if name in batch]
        if self.whole == "no pair" or (self.whole == "no label" and len(labels) != 1):
            return self._inputs(batch), batch
        if len(labels) != 1 or len(batch) == 1:
            raise DataError(
                f"a batch has {_names(batch)}; with one of {', '.join(LABELS)} in it, that is "
                "the target. Name yours: train(..., targets='NAME').",
                "no target",
            )
        return self._inputs(batch), _sound(batch[labels[0]])

    def _of_parts(self, batch: Any) -> tuple[Any, Any]:
        """A batch without names: a tensor, an object of the user's, or one to three and more."""
        is_sequence = isinstance(batch, (list, tuple)) and first_tensor(batch) is not None
        if self.inputs != "auto" or not is_sequence:
            return self._inputs(batch), batch
        required = self.parameters.required if self.parameters else ()
        # As many parts as the network takes, and one more: that is the target.
        if len(batch) > 2 and len(required) == len(batch) - 1:
            return Positions(batch[:-1]), batch[-1]
        if len(batch) == 1:
            return batch[0], batch[0]
        raise DataError(
            f"a sample has {len(batch)} parts: say which of them the network gets, and which is "
            "the target, as train(..., inputs=(0, 1), targets=2).",
            "no pair",
        )

    def _inputs(self, batch: Any, *, is_pair: bool = False, takes_labels: bool = False) -> Any:
        """What the network is called with, of a batch or, of a pair, of its inputs."""
        if not isinstance(self.inputs, str):
            return self._named(batch, tuple(self.inputs))
        if self.inputs == "one":
            return batch
        if isinstance(batch, Mapping):
            return self._columns(batch, is_pair, takes_labels)
        if isinstance(batch, (list, tuple)):
            required = self.parameters.required if self.parameters else ()
            several = len(required) > 1 and len(required) == len(batch)
            return Positions(batch) if several or self.inputs == "args" else batch
        if self.inputs == "kwargs":
            raise DataError(
                f"inputs='kwargs' needs batches with named columns, and these are a "
                f"{type(batch).__name__}; leave it out.",
                "no columns",
            )
        return batch

    def _named(self, batch: Any, names: tuple[str | int, ...]) -> Any:
        parts = {name: _sound(part_of(batch, name, "the batch")) for name in names}
        if len(parts) == 1 and not self._accepts(names[0]):
            return parts[names[0]]
        if all(self._accepts(name) for name in names):
            return Keywords({str(name): part for name, part in parts.items()})
        return Positions(parts.values())

    def _columns(self, batch: Mapping[str, Any], is_pair: bool, takes_labels: bool) -> Any:
        """Of columns: those that the network takes by name, the only one, or all as one dict."""
        others = {name: part for name, part in batch.items() if is_pair or name not in LABELS}
        offered = dict(batch) if takes_labels or not others else others
        if takes_labels and self._accepts("labels") and "labels" not in batch:
            # Columns of data sets are called "label"; networks of Hugging Face take `labels`.
            label = label_of(batch)
            offered |= {} if label is None else {"labels": label}
        taken = {name: part for name, part in offered.items() if self._accepts(name)}
        required = self.parameters.required if self.parameters else ()
        if self.inputs == "kwargs" or (taken and set(required) <= set(taken)):
            return Keywords({name: _sound(part) for name, part in (taken or offered).items()})
        if self.inputs == "args":
            return Positions(map(_sound, others.values()))
        if len(required) > 1:
            missing = [name for name in required if name not in offered]
            raise DataError(
                f"the network takes {', '.join(required)}, and the batch has {_names(batch)}: "
                f"{', '.join(missing)} is missing. Rename the columns, or say which it gets, in "
                "order: train(..., inputs=('NAME', ...)).",
                "no columns",
            )
        if len(others) == 1 and not is_pair:
            return _sound(next(iter(others.values())))
        for part in offered.values():
            _sound(part)
        return batch if is_pair or takes_labels else offered

    def _accepts(self, name: object) -> bool:
        found = self.parameters
        return found is not None and (name in found.names or (found.any_name and name != "label"))


PLAIN = BatchForm()
"""Where nobody knows the network: pairs as they are, rows as pairs of columns."""


def form_of(model: nn.Module, loss: Any, options: TrainingOptions) -> BatchForm:
    """How the batches of a training, or of an evaluation, are used by its network and its loss."""
    return BatchForm(
        inputs=options.inputs,
        targets="auto" if options.targets == "batch" else options.targets,
        whole=_whole(loss, options),
        parameters=forward_parameters(model),
        gives_loss=loss is None or (isinstance(loss, str) and loss == "output"),
    )


def _whole(loss: Any, options: TrainingOptions) -> Whole:
    if options.targets == "batch" or loss in ("output", None):
        return "always"
    if isinstance(loss, (str, Mapping)):
        return "never"
    if isinstance(loss, nn.Module):
        return "no label"
    return "always" if _takes_batch(loss) else "no pair" if options.collate else "no label"


def _takes_batch(function: Any) -> bool:
    """Whether a loss (outputs, batch) has called its second argument so."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function written in C
        return False
    return names[1:2] == ["batch"]


def _without(batch: Any, name: str | int) -> Any:
    """The other parts of a batch; the only one, if there is only one."""
    if isinstance(batch, Mapping):
        return {other: part for other, part in batch.items() if other != name}
    if isinstance(batch, (list, tuple)) and isinstance(name, int):
        others = [part for place, part in enumerate(batch) if place != name % len(batch)]
        return others[0] if len(others) == 1 else others
    return batch


def _sound(part: Any) -> Any:
    """The part; raises the DataError that stands for a column of which no batch could be made."""
    if isinstance(part, DataError):
        raise part
    return part


def _names(batch: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, batch))
