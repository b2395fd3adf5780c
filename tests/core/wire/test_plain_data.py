"""Events cross between processes as plain dicts and come back as they were."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    "event",
    [
        StartEvent(3, 10, 1000, 100, 2, "cpu", "gloo", devices=("CPU", "CPU"), ranks=(0, 1)),
        StepEvent(7, 1, 0.25, None, 0.01, 100, 1.5, 0.125),
        ValidationEvent(10, 1, 0.5, None, 200, 2.0, {"rmse": 0.5}, is_best=True),
        DataEvent(10, 1, 90, 30, 12, "503 SlowDown", 1, {"s3://a/1.jpg": "damaged"}),
    ],
)
def test_an_event_comes_back_as_it_was(event: Event) -> None:
    assert from_dict(to_dict(event)) == event


def test_an_event_of_another_version_is_not_guessed_at() -> None:
    with pytest.raises(KeyError, match="pause"):
        from_dict({"kind": "pause"})
