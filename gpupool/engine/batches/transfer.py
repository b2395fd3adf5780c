"""Batches on their way to the rank's device. Runs on engines."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpupool.core.errors import DataError
from gpupool.data.reading.trees import first_tensor, map_tensors


def moved(name: str, batch: Any, device: torch.device) -> Any:
    """The inputs or targets of a batch on the device. Raises DataError if they have no tensor.

    An object of the user's goes there by its own `to(device)`, as a batch of graphs does.
    """
    if batch is None:  # where a batch has no targets of its own
        return None
    if isinstance(batch, Tensor):  # from pinned memory the host does not wait for the copy
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
