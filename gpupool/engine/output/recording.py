"""What this process shows, heard while it is shown. Runs on engines, for an inline pool.

An engine's output reaches the client as messages. In the notebook's own process it goes straight to
the screen, as a debugger's prompt must, and is only noted.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from IPython.core.getipython import get_ipython

from gpupool.core.wire.output import STREAMS, OnMessage, OutputKind


class Recording:
    """While entered, `hear` is called with everything that is shown in this process.

    The methods of the streams themselves are replaced (as IPython does it), so that whoever holds a
    stream is heard. What `hear` shows itself, in the thread it is called in, is not noted.
    """

    def __init__(self, hear: OnMessage | None) -> None:
        self._hear = hear
        self._lock = threading.RLock()  # several threads may print
        self._thread = threading.local()  # .is_deaf: what this thread shows now is not noted
        self._undo = contextlib.ExitStack()

    def publish(self, kind: OutputKind, content: Any) -> None:
        """Have `hear` called, unless it is what shows this."""
        if self._hear is not None and not self._is_deaf():
            with self._lock, self._deaf():
                self._hear(kind, content)

    def __enter__(self) -> Recording:
        shell: Any = get_ipython()
        for kind in STREAMS:
            stream = getattr(sys, kind)
            swap(self._undo, stream, "write", self._writer(kind, stream.write))
        if shell is not None:
            display_pub = shell.display_pub
            swap(self._undo, display_pub, "publish", self._publisher(display_pub.publish))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _writer(self, kind: OutputKind, write: Callable[[str], int]) -> Callable[[str], int]:
        def noted(text: str) -> int:
            length = write(text)
            self.publish(kind, text)
            return length

        return noted

    def _publisher(self, publish: Callable[..., None]) -> Callable[..., None]:
        def noted(data: Any, metadata: Any = None, **options: Any) -> None:
            if not options.get("update"):
                self.publish(OutputKind.DISPLAY, {"data": data, "metadata": metadata or {}})
            with self._deaf():  # a terminal's publisher writes to stdout
                publish(data, metadata, **options)

        return noted

    def _is_deaf(self) -> bool:
        return getattr(self._thread, "is_deaf", False)

    @contextlib.contextmanager
    def _deaf(self) -> Iterator[None]:
        before, self._thread.is_deaf = self._is_deaf(), True
        try:
            yield
        finally:
            self._thread.is_deaf = before


def swap(undo: contextlib.ExitStack, place: Any, name: str, value: object) -> None:
    """Set an attribute of an object until `undo` is closed; a method of its class comes back."""
    if isinstance(getattr(type(place), name, None), property) or name in vars(place):
        undo.callback(setattr, place, name, getattr(place, name))
    else:
        undo.callback(vars(place).pop, name, None)
    setattr(place, name, value)
