"""Whether a press of the stop button has a loop end by itself, or an interrupt is due. Client.

A loop that asks `monitor.stop` ends at the same step on all ranks when it is told to. One that does
not ask would never hear of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpupool.core.wire.events import from_dict
from gpupool.core.wire.monitor_event import MonitorEvent


class Loops:
    """The monitors of a cell, as far as they can be told to stop. Any thread may use it."""

    def __init__(self) -> None:
        self._can_stop: dict[int, bool] = {}
        self._pressed: set[int] = set()

    def take(self, events: Sequence[dict[str, Any]]) -> None:
        """Take in what a rank has told."""
        for event in map(from_dict, events):
            if isinstance(event, MonitorEvent):
                self._can_stop[event.number] = event.status == "running" and event.heeds_stop

    def take_press(self) -> bool:
        """Whether a loop runs that can be told to stop and has not been: it has been, now."""
        ready = {number for number, can in list(self._can_stop.items()) if can} - self._pressed
        self._pressed |= ready
        return bool(ready)
