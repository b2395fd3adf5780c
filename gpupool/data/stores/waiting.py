"""How long the training of this process has waited for a batch. Runs anywhere; no torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")
_since: float | None = None


def awaited(batches: Iterator[T]) -> Iterator[T]:
    """The same batches; `waited_s` is how long the consumer has waited for the next one."""
    global _since
    while True:
        _since = time.monotonic()
        try:
            batch = next(batches)
        except StopIteration:
            return
        finally:
            _since = None
        yield batch


def waited_s() -> float | None:
    """How long a batch is being waited for; None if none is. From any thread."""
    since = _since
    return None if since is None else time.monotonic() - since
