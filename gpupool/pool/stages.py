"""The stages of what lasts, shown where the caller does not show them. Runs on the client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpupool.core import progress as bars

Progress = Callable[[str], None]


def unheard(line: str) -> None:
    """Progress that nobody is shown."""


@contextmanager
def shown(progress: Progress, what: str) -> Iterator[Progress]:
    """`progress` itself; a bar named `what` that tells the stages if that is `unheard`."""
    if progress is not unheard:
        yield progress
        return
    with bars.progress(what) as bar:
        yield bar.tell
