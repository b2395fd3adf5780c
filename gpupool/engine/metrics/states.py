"""What metrics keep of the samples of a rank, and what those of all ranks give. Runs on engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpupool.data.reading.trees import first_tensor, map_tensors

Number = float | Tensor


class MeanOf:
    """A mean, of what `sums` gives for a batch: a sum, and over how much it is."""

    def __init__(self, sums: Callable[[Any, Any], tuple[Number, Number]]) -> None:
        self._sums = sums
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._seen: Any = None

    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch; nothing is read from the device."""
        total, num = self._sums(outputs, targets)
        total = torch.as_tensor(total, dtype=torch.float64)
        pair = torch.stack([total, total.new_full((), 1) * num])
        self._seen = pair if self._seen is None else self._seen + pair

    def state(self) -> Tensor | None:
        """What this rank has seen; None if nothing."""
        return None if self._seen is None else self._seen.cpu()

    def merged(self, states: Sequence[Tensor]) -> Any:
        """The value, from the states of all ranks."""
        total, num = torch.stack(list(states)).sum(0)
        return total / num


class OfTorchmetrics:
    """A metric, or a collection, of torchmetrics, of which each rank has a part of the samples.

    torchmetrics would gather them itself, in the default process group, where ranks that do not
    train never answer, and with the defaults of ranks without samples.

    Args:
        make: the metric, for so many classes.
        rows: what it takes of (outputs, targets), and the number of classes; None if nothing.
    """

    def __init__(
        self, make: Callable[[int], Any], rows: Callable[[Any, Any], tuple[Any, Any, int] | None]
    ) -> None:
        self._make, self._rows = make, rows
        self._metric: Any = None
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        if self._metric is not None:
            self._metric.reset()
        self._has_seen = False

    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch."""
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
