"""Events and places cross between processes as plain dicts and come back as they were."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from gpupool.core.wire.events import (
    DataEvent,
    Event,
    StartEvent,
    StepEvent,
    ValidationEvent,
    from_dict,
    to_dict,
)
from gpupool.core.wire.location import Collective, Location


@pytest.mark.parametrize(
    "event",
    [
        StartEvent(3, 10, 1000, 100, 2, "cpu", "gloo", devices=("CPU", "CPU"), ranks=(0, 1)),
        StepEvent(7, 1, 0.25, None, 0.01, 100, 1.5, 0.125),
        ValidationEvent(10, 1, 0.5, None, 200, 2.0, {"rmse": 0.5}, is_best=True),
        DataEvent(10, 1, 12, "503 SlowDown", 1, {"s3://a/1.jpg": "damaged"}),
    ],
)
def test_an_event_comes_back_as_it_was(event: Event) -> None:
    assert from_dict(to_dict(event)) == event


SUM = Collective("all_reduce", 5, [0, 1, 2], 31.2, "float32[4]", "0")


def test_a_place_comes_back_as_it_was() -> None:
    where = Location("Cell In[3], line 2", SUM, "all_reduce", 1.5, False, [SUM, SUM])
    assert Location.from_dict(json.loads(json.dumps(asdict(where)))) == where
    assert Location.from_dict(asdict(Location(last=[]))) == Location(last=[])
