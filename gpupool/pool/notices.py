"""What is said while something lasts: notices on stderr, and stages. Runs on the client."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from gpupool.core import progress as bars
from gpupool.core.terminal import write_line

# A sentence to show while a call runs; None: it is over. Called in a background thread.
OnNotice = Callable[[str | None], None]
Progress = Callable[[str], None]
_TIME = re.compile(r"\d+(?:\.\d+)? (?:s|min|h)\b")


class NoticeLines:
    """Writes notices as lines, each once: one that only counts seconds further is no news.

    Any thread may call it, with None when what it said is over.

    Args:
        about: what the notices are about, if that is not what the user waits for.
        stream: where to; None: sys.stderr.
    """

    def __init__(self, about: str = "", stream: TextIO | None = None) -> None:
        self._stream = stream
        self._about = f"{about}: " if about else ""
        self._written: set[str] = set()

    def __call__(self, text: str | None) -> None:
        form = _TIME.sub("", text or "")
        if text is None:
            self._written.clear()
        elif form not in self._written:
            self._written.add(form)
            write_line(f"gpupool: {self._about}{text}", self._stream or sys.stderr)


def unheard(line: str) -> None:
    """Progress that nobody is shown."""


@contextmanager
def with_bar(progress: Progress, what: str) -> Iterator[Progress]:
    """`progress` itself; a bar named `what` that shows the stages if that is `unheard`."""
    if progress is not unheard:
        yield progress
        return
    with bars.progress(what) as bar:
        yield bar.tell
