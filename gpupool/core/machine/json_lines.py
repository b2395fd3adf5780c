"""What comes over a pipe of the agent's, line by line. Runs anywhere; the standard library only."""

from __future__ import annotations

import json
import os
from typing import IO, Any

_MAX_LINE_BYTES = 2**26  # an environment has a few MiB


class JsonLines:
    """JSON objects, one a line, as far as they have come over a pipe.

    Any other line is left out: what a `sitecustomize` prints goes the same way.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self.descriptor = pipe.fileno()
        self.closed = False
        self._pipe = pipe
        self._buffer = bytearray()

    def read(self) -> list[dict[str, Any]]:
        """The objects there are now; does not wait when the pipe is readable."""
        data = os.read(self.descriptor, 1 << 16)
        self.closed = not data
        self._buffer += data
        if b"\n" not in data:
            if len(self._buffer) > _MAX_LINE_BYTES:
                self._buffer.clear()
            return []
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        return [found for line in lines if isinstance(found := _value(line), dict)]

    def close(self) -> None:
        """Close the pipe."""
        self._pipe.close()


def _value(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
