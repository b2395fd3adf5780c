"""The Stop button of a loop of the user's: the kernel's half of a model without a view. Client.

The browser's half, `static/loop_stop.js`, puts it into the loop's picture (`picture.py`).
"""

from __future__ import annotations

import secrets
import threading
from typing import Any

from gpupool.notebook.page.page_buttons import Meant, PageButtons, in_one_module


class LoopStop(PageButtons):
    """The button in the picture named `uid`. A press sets `wish`; `close` takes it away."""

    names = ("stop",)
    _esm = in_one_module("page_buttons.js", "loop_stop.js")
    # `view` has "is_stopping", whether the end was asked for

    def __init__(self, wish: threading.Event) -> None:
        self._wish = wish
        self._lock = threading.Lock()
        super().__init__(secrets.token_hex(4), self._take)

    @property
    def heard(self) -> dict[str, Any]:
        """The whole view."""
        return {"is_stopping": self._num_presses > 0, **super().heard}

    def _take(self, press: str, meant: Meant) -> None:
        if press:
            self._wish.set()
        with self._lock:
            self.view = self.heard  # the browser takes this for the acknowledgement
