"""Whether a press of the stop button ends a loop gracefully, or an interrupt is due. Client.

A loop that asks `monitor.stop` ends at the same step on all ranks. One that does not ask would
never hear of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpupool.core.wire.events import Event
from gpupool.core.wire.monitor_event import MonitorEvent


class Loops:
    """The monitors of a cell that can be asked to stop. Any thread may use it."""

    def __init__(self) -> None:
        self._can_stop: dict[int, bool] = {}
        self._pressed: set[int] = set()

    def take(self, events: Sequence[Event]) -> None:
        """Note what a rank has reported."""
        for event in events:
            if isinstance(event, MonitorEvent):
                self._can_stop[event.number] = event.status == "running" and event.heeds_stop

    def take_press(self) -> bool:
        """Whether a loop runs that can be asked to stop and was not. It counts as asked then."""
        # A copy: events of other ranks arrive in another thread meanwhile.
        ready = {number for number, can in list(self._can_stop.items()) if can} - self._pressed
        self._pressed |= ready
        return bool(ready)
