"""Events from an engine to the client. Runs on engines; only this file knows ipyparallel."""

from __future__ import annotations

from collections.abc import Sequence

from gpupool.core.progress import Course, Drawing
from gpupool.core.wire.events import Event, ProgressEvent, to_dict
from gpupool.core.wire.output import OutputKind
from gpupool.engine.process import this_rank


def emit(events: Sequence[Event]) -> None:
    """Send events to the client that made the running call, in order, without waiting."""
    from ipyparallel.datapub import publish_data

    publish_data({OutputKind.EVENTS.value: [to_dict(event) for event in events]})


def open_drawing(course: Course) -> Drawing | None:
    """What shows a course in the notebook, on the first rank; the others do the same, mostly."""
    return emit_progress if course.on_any_rank or this_rank().rank == 0 else None


def emit_progress(course: Course) -> None:
    """Send how far it is; at its end all of it is done."""
    done, total = course.done, course.total or 0
    if course.is_over:
        done = total = max(1, done)
    emit([ProgressEvent(course.what, done, total, course.unit)])
