"""The states of a torchmetrics object, put together over ranks. Runs on engines.

torchmetrics would gather them itself, in the default process group, where ranks that do not train
never answer. It is not imported: an object is one of its metrics if it looks so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpupool.data.reading.trees import map_tensors

State = list[dict[str, Any]]  # of each metric in it, by name


def looks_so(metric: object) -> bool:
    """Whether this is a metric, or a collection, of torchmetrics."""
    return isinstance(metric, nn.Module) and all(
        callable(getattr(metric, name, None)) for name in ("update", "compute", "reset")
    )


class TorchMetric:
    """A torchmetrics object, of which each rank has a part of the samples.

    `in_float64`: its sums are float64, and its counts are when they are divided.
    """

    def __init__(
        self, metric: Any, device: torch.device | str, *, in_float64: bool = False
    ) -> None:
        self._metric, self._in_float64 = metric.to(device), in_float64
        if in_float64:  # after `to`, which would set it back
            self._metric.set_dtype(torch.float64)
        # A rank without samples gives no state: its default would count in a mean or a minimum.
        self._is_untouched = True
        for part in self._parts():
            part.distributed_available_fn = _never
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._metric.reset()
        self._is_untouched = True

    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch."""
        self._metric.update(outputs, targets)
        self._is_untouched = False

    def state(self) -> State | None:
        """Its states, on the CPU; None if it has seen nothing."""
        if self._is_untouched:
            return None
        return [
            {name: map_tensors(Tensor.cpu, getattr(part, name)) for name in part._reductions}
            for part in self._parts()
        ]

    def merged(self, states: Sequence[State]) -> Any:
        """What it computes from the states of all ranks; it must have been updated here."""
        for number, part in enumerate(self._parts()):
            for name, reduction in part._reductions.items():
                together = _together([state[number][name] for state in states], reduction)
                if self._in_float64 and isinstance(together, Tensor):
                    together = together.double()
                setattr(part, name, map_tensors(partial(Tensor.to, device=part.device), together))
        return map_tensors(Tensor.cpu, self._metric.compute())

    def _parts(self) -> Iterator[Any]:
        """The metrics in it that have a state; itself, if it is no wrapper or collection."""
        return (part for part in self._metric.modules() if hasattr(part, "_reductions"))


def _together(values: list[Any], reduction: Any) -> Any:
    """As `Metric._sync_dist` does it, but for lists, which become that of one process."""
    if isinstance(values[0], list):
        return [item for part in values for item in part]
    stacked = torch.stack(values)
    return stacked if reduction is None else reduction(stacked)


def _never() -> bool:
    return False
