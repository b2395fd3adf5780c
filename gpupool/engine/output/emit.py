"""Events from an engine to the client. Runs on engines; only this file knows ipyparallel."""

from __future__ import annotations

from collections.abc import Sequence

from gpupool.core.progress import Progress
from gpupool.core.wire.events import Event, ProgressEvent, to_dict
from gpupool.core.wire.output import OutputKind
from gpupool.engine.process import this_rank


def emit(events: Sequence[Event]) -> None:
    """Send events to the client that made the running call, in order, without waiting."""
    from ipyparallel.datapub import publish_data

    publish_data({OutputKind.EVENTS.value: [to_dict(event) for event in events]})


def emit_progress(one: Progress) -> None:
    """Send how far it is, on the first rank: the others do the same, mostly."""
    if this_rank().rank != 0 and not one.on_any_rank:
        return
    done, total = one.done, one.total or 0
    if one.is_over:
        done = total = max(1, done)
    emit([ProgressEvent(one.what, done, total, one.unit)])
