"""Whether bytes are those that a store holds: what seems damaged is read again. Runs anywhere.

    image = whole(part, data, lambda data, strict: decode(data, name, strict))

Bytes may change on their way, and a cache may keep them so. An ETag that is the MD5 of what was
read proves it; those of large uploads and of some encryptions are no MD5, and prove nothing. No
torch.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import TypeVar

from gpupool.core.errors import SampleError
from gpupool.data.stores.interface import Part, version_of
from gpupool.data.stores.retry import counts

T = TypeVar("T")
_MOST_READS = 3
_ENOUGH = 8  # files alike on every read, and none proven: the store's ETags are no MD5s


class _Noted(threading.local):
    doubt: SampleError | None = None


noted = _Noted()
"""`noted.doubt`: the last warning of a decoder in this thread, of bytes that are confirmed."""


def whole(part: Part, data: bytes, make: Callable[[bytes, bool], T]) -> T:
    """What `make(data, strict)` gives, of bytes that are the store's as far as can be known.

    A strict one raises SampleError "damaged" also for what can be decoded, with a warning. Then the
    bytes are confirmed; what still is so is made without being strict. Raises what `make` raises.
    """
    for _ in range(2):
        try:
            return make(data, True)
        except SampleError as error:
            if error.reason != "damaged":
                raise
            doubt = error
        again = confirmed(part, data)
        if again is data:
            break
        data = again
    made = make(data, False)
    noted.doubt = doubt
    return made


def confirmed(part: Part, data: bytes) -> bytes:
    """`data` if its ETag proves it, or another read gives the same; else what that gave.

    Raises what reading raises.
    """
    for _ in range(_MOST_READS - 1):
        if is_proven(part, data):
            break
        again = part.read(fresh=True)
        if again == data:
            break
        counts.add(retries=1, reason="changed on its way")
        data = again
    return data


def is_proven(part: Part, data: bytes) -> bool:
    """Whether the ETag of a whole file is the MD5 of these bytes."""
    if not part.file.version or part.start or part.length is not None:
        return False
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    return version_of(found) == part.file.version


class Verifier:
    """Decides about every whole file that has an ETag; stops where ETags turn out to be no MD5s."""

    def __init__(self) -> None:
        self._num_proven = self._num_alike = 0

    def __call__(self, part: Part, data: bytes) -> bytes:
        """See `confirmed`."""
        if not part.file.version or part.start or part.length is not None:
            return data
        if not self._num_proven and self._num_alike >= _ENOUGH:
            return data
        found = confirmed(part, data)
        if is_proven(part, found):
            self._num_proven += 1
        elif found is data:
            self._num_alike += 1
        return found
