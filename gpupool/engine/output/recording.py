"""What this process shows, seen on its way out. Runs on engines, for an inline pool.

An engine's output reaches the client as messages. In the notebook's own process it goes straight to
the screen, as a debugger's prompt must, and is noted in passing.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

from IPython.core.getipython import get_ipython

# (kind, content) -> the content as it may be shown; "update" is a display that changes an earlier
# one, the other kinds are those of `gpupool.pool.processes.iopub.OnMessage`
Take = Callable[[str, Any], Any]


class Recording:
    """While entered, everything shown in this process goes through `take` first.

    The methods of the streams themselves are replaced (as IPython does it), so that whoever holds a
    stream is heard. What `take` shows itself, in the thread it is called in, is not noted.
    """

    def __init__(self, take: Take) -> None:
        self._take = take
        self._thread = threading.local()  # .is_our_own: what this thread shows now is not noted
        self._undo = contextlib.ExitStack()

    def publish(self, kind: str, content: Any) -> Any:
        """Pass something on to `take`; gives what may be shown of it."""
        return self._as_our_own(lambda: self._take(kind, content))

    def __enter__(self) -> Recording:
        shell: Any = get_ipython()
        for kind in ("stdout", "stderr"):
            stream = getattr(sys, kind)
            swap(self._undo, stream, "write", self._writer(kind, stream.write))
        if shell is not None:
            display_pub = shell.display_pub
            swap(self._undo, display_pub, "publish", self._publisher(display_pub.publish))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _writer(self, kind: str, write: Callable[[str], int]) -> Callable[..., int]:
        def noted(text: str) -> int:
            if self._is_our_own() or not isinstance(text, str):
                return write(text)
            shown = self.publish(kind, text)
            if shown:
                write(shown)
            return len(text)

        return noted

    def _publisher(self, publish: Callable[..., None]) -> Callable[..., None]:
        def noted(data: Any, metadata: Any = None, **options: Any) -> Any:
            if self._is_our_own():
                return publish(data, metadata, **options)
            kind = "update" if options.get("update") else "display"
            shown = self.publish(kind, {"data": data, "metadata": metadata or {}})
            # a terminal's publisher writes to stdout
            return self._as_our_own(lambda: publish(shown["data"], shown["metadata"], **options))

        return noted

    def _is_our_own(self) -> bool:
        return getattr(self._thread, "is_our_own", False)

    def _as_our_own(self, work: Callable[[], Any]) -> Any:
        before, self._thread.is_our_own = self._is_our_own(), True
        try:
            return work()
        finally:
            self._thread.is_our_own = before


def swap(undo: contextlib.ExitStack, place: Any, name: str, value: object) -> None:
    """Set an attribute of an object until `undo` is closed; a method of its class comes back."""
    if isinstance(getattr(type(place), name, None), property) or name in vars(place):
        undo.callback(setattr, place, name, getattr(place, name))
    else:
        undo.callback(vars(place).pop, name, None)
    setattr(place, name, value)
