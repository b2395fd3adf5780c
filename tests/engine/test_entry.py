"""Every call and every request has what serves it; answers cross as they are."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

from gpupool.core.wire import calls
from gpupool.core.wire.calls import BoundCall, Call
from gpupool.core.wire.location import Collective, Location
from gpupool.core.wire.requests import REQUESTS, Answer, ControlRequest, Stop, Waits, Where
from gpupool.engine import control, entry


def test_every_call_is_served() -> None:
    kinds = {one for one in vars(calls).values() if isinstance(one, type) and issubclass(one, Call)}
    for kind in kinds - {Call, BoundCall}:
        assert f"case wire.{kind.__name__}(" in inspect.getsource(entry)


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_request_is_answered_also_one_that_makes_no_sense(
    kind: type[ControlRequest[Any]],
) -> None:
    assert control.answer(kind, {"nonsense": 1}).status == "error"
    assert f"case requests.{kind.__name__}(" in inspect.getsource(control._do)


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (Stop("job"), Answer("ok", Waits(0.5, 0.0, "503"))),
        (Where(), Answer("ok", Location("Cell, line 2", Collective("send", 0, [0, 1]), last=[]))),
        (Where(), Answer("error", error="no")),
    ],
)
def test_an_answer_crosses_as_json(request_: ControlRequest[Any], answer: Answer[Any]) -> None:
    assert request_.answer(json.loads(json.dumps(answer.content()))) == answer
