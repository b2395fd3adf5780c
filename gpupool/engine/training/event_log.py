"""The events of a training so far, so that a checkpoint has them too. Runs on engines."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

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

_COLUMNS = tuple(f.name for f in fields(StepEvent))
_PART = 1000  # events in one message: a history of any length passes
_WHOLE = ("step", "epoch", "num_samples")
_KEPT = (ValidationEvent, WarningEvent, CheckpointEvent)


class EventLog:
    """Passes events to `emit` and to `board`, and keeps those of steps as columns of numbers.

    `state()` costs a copy of these columns, whatever the number of steps.
    """

    def __init__(self, emit: Callable[[Sequence[Event]], None], board: Board | None = None) -> None:
        self._emit = emit
        self.board = board
        self._columns = {name: array("d") for name in _COLUMNS}
        self._others: list[tuple[int, dict[str, Any]]] = []  # and after how many steps it came

    @property
    def num_steps(self) -> int:
        """Steps whose events have come."""
        return len(self._columns["step"])

    def __call__(self, events: Sequence[Event]) -> None:
        """Emit these events."""
        self._emit_and_keep(events)
        if self.board is not None:
            self.board(events)

    def state(self, unreported: Sequence[StepEvent] = ()) -> dict[str, Any]:
        """All of it as plain values and float64 tensors; `unreported` steps are put at the end."""
        # Arrays of float64 instead of events: a million steps are 64 MB, and are copied at once.
        columns = {}
        for name, column in self._columns.items():
            new = array("d", [_number(getattr(event, name)) for event in unreported])
            columns[name] = torch.from_numpy(np.array(column + new))
        return {"steps": columns, "others": list(self._others)}

    def replay(self, state: Mapping[str, Any]) -> None:
        """Emit what a checkpoint holds, in order; TensorBoard has it from before."""
        steps = _step_events(state["steps"])
        done = 0
        # In the order in which they came, as the client folds them in order.
        for number, plain in state["others"]:
            self._emit_in_parts(steps[done:number])
            self._emit_and_keep([from_dict(plain)])
            done = max(done, number)
        self._emit_in_parts(steps[done:])
        if self.board is not None:
            self.board.go_on(len(steps), steps[-1].elapsed_s if steps else 0.0)

    def _emit_in_parts(self, events: Sequence[Event]) -> None:
        for first in range(0, len(events), _PART):
            self._emit_and_keep(events[first : first + _PART])

    def _emit_and_keep(self, events: Sequence[Event]) -> None:
        for event in events:
            self._keep(event)
        self._emit(events)

    def _keep(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            for name, column in self._columns.items():
                column.append(_number(getattr(event, name)))
        elif isinstance(event, _KEPT) or (isinstance(event, DataEvent) and _is_news(event)):
            # As plain dicts: `torch.load(weights_only=True)` knows no classes of ours.
            self._others.append((self.num_steps, to_dict(event)))


def _is_news(event: DataEvent) -> bool:
    """Whether it has more than reads that went well, of which there are many events."""
    return bool(event.num_skipped or event.num_retried)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _step_events(columns: Mapping[str, Tensor]) -> list[StepEvent]:
    rows = zip(*(columns[name].tolist() for name in _COLUMNS), strict=True)
    return [_step_event(dict(zip(_COLUMNS, row, strict=True))) for row in rows]


def _step_event(row: dict[str, Any]) -> StepEvent:
    for name in _WHOLE:
        row[name] = int(row[name])
    if math.isnan(row["accuracy"]):
        row["accuracy"] = None
    return StepEvent(**row)
