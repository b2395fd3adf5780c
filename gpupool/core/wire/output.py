"""What ranks show while a call runs: the kinds of it, and who listens. Runs anywhere."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any


class OutputKind(StrEnum):
    """What a piece of output is, and so what its content is."""

    STDOUT = "stdout"  # text
    STDERR = "stderr"  # text
    DISPLAY = "display"  # a mime bundle
    RESULT = "result"  # the same, of the last expression of a cell
    UPDATE = "update"  # the same, in the place of an earlier one of the same display_id
    CLEAR = "clear"  # {"wait": bool}
    EVENTS = "events"  # of a call on one rank plain dicts, of several ranks `events.Event`


STREAMS = (OutputKind.STDOUT, OutputKind.STDERR)  # whose content is text
PIECES = "gpupool_pieces"  # metadata of text of both streams: the lengths of its pieces, in turns

# (kind, content): of a call on one rank
OnMessage = Callable[[OutputKind, Any], None]

# (rank, kind, content): of a call on several ranks
OnOutput = Callable[[int, OutputKind, Any], None]
