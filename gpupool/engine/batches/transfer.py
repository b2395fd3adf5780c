"""Batches on their way to the rank's device, beside what it computes there. Runs on engines.

A copy in the stream of the steps would wait for all of them, and they for it. Aside it runs while
the steps before it compute. It lies in memory of its own then, which comes back when the device has
come so far, not when Python frees it. So the host is at most two steps ahead of the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpupool.core.errors import DataError
from gpupool.data import device as devices
from gpupool.data.device import Aside, Mark
from gpupool.data.reading.trees import first_tensor, map_tensors, tensors

MAX_STEPS_AHEAD = 2


def moved(name: str, batch: Any, device: torch.device) -> Any:
    """The inputs or targets of a batch on the device. Raises DataError if they have no tensor.

    An object of the user's goes there by its own `to(device)`, as a batch of graphs does.
    """
    if batch is None:  # where a batch has no targets of its own
        return None
    if isinstance(batch, Tensor):  # from pinned memory the copy overlaps with what the GPU does
        return batch.to(device, non_blocking=True)
    if first_tensor(batch) is None:
        if callable(getattr(batch, "to", None)):
            return batch.to(device)
        # None of its columns could be made: the first error says why.
        for part in batch.values() if isinstance(batch, Mapping) else ():
            if isinstance(part, DataError):
                raise part
        raise DataError(
            f"the {name} of a batch are a {type(batch).__name__}, not a tensor; change what the "
            "transform or the data set returns",
            "no tensor",
        )
    return map_tensors(partial(Tensor.to, device=device, non_blocking=True), batch)


@contextmanager
def transfer(device: torch.device) -> Iterator[Transfer]:
    """What brings the batches of one reading to the device."""
    with devices.borrowed_aside(device) as aside:
        yield Transfer(device, aside)


class Transfer:
    """Brings batches to `device` in the stream `aside`."""

    def __init__(self, device: torch.device, aside: Aside) -> None:
        self._device, self._aside = device, aside
        self._here = devices.of(device)
        self._steps: deque[Mark] = deque()  # the end of each that the device may not have reached

    def bring(self, **halves: Any) -> tuple[Any, ...]:
        """Halves of a batch, by name, on the device; the stream of the moment waits for them.

        Raises DataError if one of them has no tensor.
        """
        with self._aside:
            brought = tuple(moved(name, half, self._device) for name, half in halves.items())
            handover = self._aside.hand_over(tensors(brought))
        handover.take()
        return brought

    def end_step(self) -> None:
        """The step with the last batch has been given to the device; waits if that is behind."""
        self._steps.append(self._here.mark())
        if len(self._steps) > MAX_STEPS_AHEAD:
            self._steps.popleft().synchronize()
