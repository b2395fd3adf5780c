"""Events from an engine to the client. Runs on engines; only this file knows ipyparallel."""

from __future__ import annotations

from collections.abc import Sequence

from gpupool.core.events import Event, to_dict
from gpupool.engine import here


def emit(events: Sequence[Event]) -> None:
    """Send events to the client that made the running call, in order, without waiting."""
    plain = [to_dict(event) for event in events]
    if here.publish is not None:
        here.publish("events", plain)
        return
    from ipyparallel.datapub import publish_data

    publish_data({"events": plain})
