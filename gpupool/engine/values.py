"""Values on their way to the notebook. Runs on engines."""

from __future__ import annotations

import io
from typing import Any

import cloudpickle
import numpy as np
import torch


class TooLargeError(Exception):
    """The pickled value would pass the limit."""


def pickle_value(value: object, max_bytes: int | None = None) -> bytes:
    """`value` pickled; tensors on a GPU arrive on the CPU, where the notebook can read them.

    Raises:
        TooLargeError: it takes more than `max_bytes`; known before a large tensor is copied.
        Exception: whatever the value's class raises when it cannot be pickled.
    """
    file = _BoundedFile(max_bytes)
    _Pickler(file, max_bytes).dump(value)
    return file.getvalue()


class _BoundedFile(io.BytesIO):
    def __init__(self, max_bytes: int | None) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    def write(self, data: Any) -> int:
        _check(self.tell() + len(data), self._max_bytes)
        return super().write(data)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, max_bytes: int | None) -> None:
        super().__init__(file, protocol=5)
        self._max_bytes = max_bytes

    def persistent_id(self, obj: object) -> None:
        """Looks at every part before it is pickled; makes none persistent."""
        if isinstance(obj, (torch.Tensor, np.ndarray)):
            _check(obj.nbytes, self._max_bytes)

    def reducer_override(self, obj: Any) -> Any:
        """How a part is pickled."""
        if isinstance(obj, torch.Tensor) and obj.is_cuda:
            return obj.detach().cpu().__reduce_ex__(5)
        return super().reducer_override(obj)


def _check(num_bytes: int, max_bytes: int | None) -> None:
    if max_bytes is not None and num_bytes > max_bytes:
        raise TooLargeError
