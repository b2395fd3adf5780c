"""How far something is that a rank does, told to the notebook. Runs on engines."""

from __future__ import annotations

from gpupool.core.events import ProgressEvent
from gpupool.core.progress import Course, Drawing
from gpupool.engine.boot import this_rank
from gpupool.engine.emit import emit


def open_telling(course: Course) -> Drawing | None:
    """What tells the notebook of a course on the first rank; the others do the same, mostly."""
    return tell if course.on_any_rank or this_rank()["rank"] == 0 else None


def tell(course: Course) -> None:
    """Send how far it is; at its end all of it is done."""
    total = (course.done if course.end else course.total) or 0
    done = max(1, total) if course.end else course.done
    emit([ProgressEvent(course.what, done, max(done, total) if course.end else total, course.unit)])
