"""Every call and every request has what serves it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from gpupool.core.wire import calls
from gpupool.core.wire.calls import BoundCall, Call
from gpupool.core.wire.requests import REQUESTS, ControlRequest
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
