"""What comes over a pipe of the agent's, line by line. Runs anywhere; the standard library only."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import IO, Any, Generic, TypeVar

_MAX_LINE_BYTES = 2**25  # an environment has a few MiB
_KIND = "kind"

Line = TypeVar("Line")


def encode(message: object) -> bytes:
    """A message, which is a dataclass without slots, as a line: its kind and its fields."""
    return json.dumps({_KIND: _kind(type(message)), **vars(message)}).encode() + b"\n"


class JsonLines(Generic[Line]):
    """Messages of these kinds, one a line, as far as they have come over a pipe.

    Any other line is left out: what a `sitecustomize` prints goes the same way.
    """

    def __init__(self, pipe: IO[bytes], kinds: Iterable[type[Line]]) -> None:
        self.descriptor = pipe.fileno()
        self.closed = False
        self._kinds = {_kind(each): each for each in kinds}
        self._pipe = pipe
        self._buffer = bytearray()

    def read(self) -> list[Line]:
        """The messages there are now; does not wait when the pipe is readable."""
        data = os.read(self.descriptor, 1 << 16)
        self.closed = not data
        self._buffer += data
        if b"\n" not in data:
            if len(self._buffer) > _MAX_LINE_BYTES:
                self._buffer.clear()
            return []
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        return [found for line in lines if (found := self._decoded(line)) is not None]

    def close(self) -> None:
        """Close the pipe."""
        self._pipe.close()

    def _decoded(self, line: bytes) -> Line | None:
        try:
            fields: dict[str, Any] = json.loads(line)
            return self._kinds[fields.pop(_KIND)](**fields)
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            return None


def _kind(message: type[object]) -> str:
    return message.__name__.lower()
