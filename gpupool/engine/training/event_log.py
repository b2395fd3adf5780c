"""The events of a training so far, so that a checkpoint has them too. Runs on engines."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from gpupool.core.wire.events import (
    CheckpointEvent,
    DataEvent,
    Event,
    StepEvent,
    ValidationEvent,
    WarningEvent,
    from_dict,
    to_dict,
)
from gpupool.engine.training.tensorboard import Board

_row = attrgetter(*(one.name for one in fields(StepEvent)))
_NUM_FIELDS = len(fields(StepEvent))
_PART = 1000  # events in one message: a history of any length passes
_KEPT = (ValidationEvent, WarningEvent, CheckpointEvent)


class EventLog:
    """Passes events to `emit` and to `board`, and keeps those of steps as rows of numbers.

    `state()` costs a copy of these, whatever the number of steps: a million are 64 MB.
    """

    def __init__(self, emit: Callable[[Sequence[Event]], None], board: Board | None = None) -> None:
        self._emit, self._board = emit, board
        self._steps = array("d")
        self._others: list[tuple[int, dict[str, Any]]] = []  # and after how many steps it came

    def __call__(self, events: Sequence[Event]) -> None:
        """Emit these events."""
        self._emit_and_keep(events)
        if self._board is not None:
            self._board(events)

    def state(self) -> dict[str, Any]:
        """All of it as plain values and a float64 tensor."""
        steps = torch.from_numpy(np.array(self._steps)).view(-1, _NUM_FIELDS)
        return {"steps": steps, "others": list(self._others)}

    def replay(self, state: Mapping[str, Any]) -> None:
        """Emit what a checkpoint holds, in order; TensorBoard has it from before."""
        steps, events, done = [_step_event(*row) for row in state["steps"].tolist()], [], 0
        for number, plain in state["others"]:
            events += [*steps[done:number], from_dict(plain)]
            done = number
        events += steps[done:]
        for first in range(0, len(events), _PART):
            self._emit_and_keep(events[first : first + _PART])
        if self._board is not None:
            self._board.go_on(len(steps))

    def _emit_and_keep(self, events: Sequence[Event]) -> None:
        for event in events:
            is_news = isinstance(event, DataEvent) and (event.num_skipped or event.num_retried)
            if isinstance(event, StepEvent):
                self._steps.extend(math.nan if one is None else one for one in _row(event))
            elif isinstance(event, _KEPT) or is_news:  # reads that went well are many events
                # As plain dicts: `torch.load(weights_only=True)` knows no classes of ours.
                self._others.append((len(self._steps) // _NUM_FIELDS, to_dict(event)))
        self._emit(events)


def _step_event(
    step: float, epoch: float, loss: float, accuracy: float, lr: float, num: float, *times_s: float
) -> StepEvent:
    known = None if math.isnan(accuracy) else accuracy
    return StepEvent(int(step), int(epoch), loss, known, lr, int(num), *times_s)
