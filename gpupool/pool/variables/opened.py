"""Constants that the notebook itself looks at, in the memory that the ranks have. On the client.

A data set that `pool.put` has brought to the ranks may be gone from the notebook; what `train` and
the others check of it before, its length or its classes, is read here.
"""

from __future__ import annotations

import threading
from typing import Any

from gpupool.pool.variables.composite import Constant
from gpupool.pool.variables.parcels import Parcels


class Opened:
    """The values of constants, each the same object while the constant is there."""

    def __init__(self, parcels: Parcels, lock: threading.RLock) -> None:
        self._parcels, self._lock = parcels, lock
        self._values: dict[int, Any] = {}

    def value_of(self, constant: Constant) -> Any:
        """What a constant is, mapped from where the ranks map it.

        Raises:
            PoolError: it is not one of this pool's, or refers to what the notebook has released.
        """
        with self._lock:
            number = self._parcels.number_of(constant)
            if number not in self._values:
                self._values[number] = self._parcels.load(number)
            return self._values[number]

    def number_of(self, value: object) -> int | None:
        """The parcel of a constant, or of what `value_of` has given for one; None of any other.

        Raises:
            PoolError: it is a constant of another pool.
        """
        if isinstance(value, Constant):
            return self._parcels.number_of(value)
        return next((n for n, other in self._values.items() if other is value), None)

    def close(self, number: int) -> int:
        """The constant of this parcel is not wanted any more; gives the number back."""
        self._values.pop(number, None)
        return number
