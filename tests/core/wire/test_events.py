"""Events cross between processes as plain dicts and come back as they were."""

from __future__ import annotations

import json

import pytest

from gpupool.core.wire.events import (
    CheckpointEvent,
    DataEvent,
    EndEvent,
    Event,
    ResumeEvent,
    StartEvent,
    StepEvent,
    ValidationEvent,
    WarningEvent,
    from_dict,
    to_dict,
)


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        ("start", StartEvent(3, 10, 1000, 100, 2, "cpu", "gloo")),
        ("step", StepEvent(7, 1, 0.25, None, 0.01, 100, 1.5, 0.125)),
        ("validation", ValidationEvent(10, 1, 0.5, None, 200, 2.0, {"rmse": 0.5}, is_best=True)),
        ("warning", WarningEvent("data", "the ranks waited", 12)),
        ("checkpoint", CheckpointEvent(8, 1, "s3://a/run/step-00000008.pt", 99, 0.001, 0.5)),
        ("resume", ResumeEvent(8, 1, "s3://a/run/step-00000008.pt", 2)),
        ("data", DataEvent(10, 1, 90, 30, 12, "503 SlowDown", 1, {"s3://a/1.jpg": "damaged"})),
        ("end", EndEvent("patience", 8, 2.5, kept_step=4)),
    ],
)
def test_an_event_comes_back_as_it_was(kind: str, event: Event) -> None:
    data = json.loads(json.dumps(to_dict(event)))  # plain enough for any channel
    assert data["kind"] == kind
    before = dict(data)
    assert from_dict(data) == event
    assert data == before


def test_an_event_of_another_version_is_not_guessed_at() -> None:
    with pytest.raises(KeyError, match="pause"):
        from_dict({"kind": "pause"})
