"""How a loop of the user's goes, as lines: for terminals and logs. Runs anywhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TextIO

from gpupool.core.terminal import plain, write_line
from gpupool.core.wire.events import OVER, MonitorEvent

LINE_EVERY_S = 2.0


def monitor_line(event: MonitorEvent, step: int, latest: Mapping[str, float]) -> str:
    """Where a loop is, in one line, from the last step and the last value of each metric.

    >>> event = MonitorEvent(1, "Mine", 200, 2, {}, {"epoch": "3"}, "running", True, 4.5)
    >>> monitor_line(event, 120, {"loss": 0.25})
    'Mine: step 120 of 200, loss 0.25, epoch 3, 4.5 s'
    """
    done = f"step {step}" + (f" of {event.num_steps}" if event.num_steps else "")
    values = [f"{name} {value:.4g}" for name, value in latest.items()]
    facts = [f"{name} {value}" for name, value in event.info.items()]
    status = [] if event.status == "running" else [event.status]
    parts = [*status, done, *values, *facts, f"{event.elapsed_s:.1f} s"]
    return plain(f"{event.title}: {', '.join(parts)}")


class MonitorLines:
    """Call it with each event: lines are `LINE_EVERY_S` apart, but for the first and the last."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._written_at = -LINE_EVERY_S
        self._status = ""
        self._step = 0
        self._latest: dict[str, float] = {}

    def __call__(self, event: MonitorEvent) -> None:
        for step, _, values in event.rows:
            self._step = step
            self._latest |= values
        if not self._step and event.status not in OVER:
            return
        now = time.monotonic()
        if event.status == self._status and now - self._written_at < LINE_EVERY_S:
            return
        self._written_at, self._status = now, event.status
        write_line(monitor_line(event, self._step, self._latest), self._stream)
