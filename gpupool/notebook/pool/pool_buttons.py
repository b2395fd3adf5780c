"""The buttons of a pool's bars: the kernel's half of a model without a view. Runs on the client.

The browser's half, `static/pool_bar.js`, finds the bars in the page by their name. So what a
notebook keeps is HTML, and after a reload the buttons come back, for the model lives in the kernel.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict

from gpupool.notebook.page.page_buttons import Meant, PageButtons, in_one_module
from gpupool.notebook.pool.bar import Bar

_SAME_DEADLINE_S = 2.0


class PoolButtons(PageButtons):
    """Keeps the bars named `uid` in step with what `tell` is given."""

    names = ("interrupt", "stop")
    _esm = in_one_module("page_buttons.js", "pool_bar.js")
    _css = in_one_module("page_buttons.css", "pool_bar.css")
    # `view` is `Bar` and "note", what becomes of a press, and "meant", what one is meant for

    def __init__(self, uid: str, on_press: Callable[[str, Meant], None]) -> None:
        self._lock = threading.Lock()
        self._stops_at = 0.0
        super().__init__(uid, on_press)

    def tell(self, bar: Bar, note: str, meant: Meant) -> None:
        """Show this in all bars; a message leaves the kernel if it is new. Any thread may call."""
        with self._lock:
            left = bar.idle_left_s
            stops_at = 0.0 if left is None else time.monotonic() + left
            view = {**asdict(bar), "note": note, "meant": meant, **self.heard}
            same = {**self.view, "idle_left_s": left} == {**view, "idle_left_s": left}
            if same and abs(stops_at - self._stops_at) < _SAME_DEADLINE_S:
                return
            self._stops_at = stops_at
            self.view = view
