"""What crosses the line to a starter, message by message. Runs anywhere; standard library only."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

_KIND = "kind"

Line = TypeVar("Line")


def encode(message: object) -> bytes:
    """A message, which is a dataclass without slots, as a line: its kind and its fields."""
    return json.dumps({_KIND: _kind(type(message)), **vars(message)}).encode() + b"\n"


class JsonLines(Generic[Line]):
    """Messages of these kinds, one a line, as far as they have come from a descriptor.

    Any other line is left out: what a `sitecustomize` prints goes the same way.
    """

    def __init__(self, descriptor: int, kinds: Iterable[type[Line]]) -> None:
        self.descriptor = descriptor
        self.closed = False
        self._kinds = {_kind(each): each for each in kinds}
        self._rest = b""

    def read(self) -> list[Line]:
        """The messages there are now; does not wait when the descriptor is readable."""
        data = os.read(self.descriptor, 1 << 16)
        self.closed = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [found for line in lines if (found := self._decoded(line)) is not None]

    def _decoded(self, line: bytes) -> Line | None:
        try:
            fields: dict[str, Any] = json.loads(line)
            return self._kinds[fields.pop(_KIND)](**fields)
        except (ValueError, LookupError, TypeError, AttributeError):
            return None


def _kind(message: type[object]) -> str:
    return message.__name__.lower()
