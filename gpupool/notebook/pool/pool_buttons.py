"""The buttons of a pool's bars: the kernel's half of a model without a view. Runs on the client.

A bar has no end at which a still picture could take a widget's place: notebooks are saved while
their pool runs. So what a notebook keeps is HTML without buttons, in which the browser's half
(`static/pool_bar.js`) finds the bars by their name. After a reload the buttons come back, for the
model lives in the kernel.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import traitlets

from gpupool.notebook.page.live_widget import LiveWidget
from gpupool.notebook.page.markup import static_text
from gpupool.notebook.pool.bar import Bar

Meant = tuple[int, ...] | None
"""What a press is meant for: the "meant" of the view that the page had, if there was one."""

# The page counts down automatically: only another deadline is news, and looks jitter.
_SAME_DEADLINE_S = 2.0


class PoolButtons(LiveWidget):
    """Buttons in all bars that are named `uid`, which show what `tell` is given.

    `on_press(press, meant)` is called with "interrupt" or "stop", or with "" when a page wants an
    answer, which is a new `view`; in a thread of the kernel's choice, perhaps while the main thread
    is in the middle of something: it may only put the words somewhere.
    """

    _esm = static_text("life.js", "pool_bar.js")
    _css = static_text("pool_bar.css")

    uid = traitlets.Unicode().tag(sync=True)
    # `Bar`; "note", what becomes of a press; "meant", what one is meant for; "presses", how many
    # were heard; "answers", how many pages have asked whether anybody is there
    view = traitlets.Dict().tag(sync=True)

    def __init__(self, uid: str, on_press: Callable[[str, Meant], None]) -> None:
        # Before the base class, which registers the model: a page may answer at once.
        self._on_press = on_press
        self._num_presses = self._num_answers = 0
        self._lock = threading.Lock()
        self._stops_at = 0.0
        super().__init__(uid=uid, view=self._heard)
        self.on_msg(self._receive)

    @property
    def is_seen(self) -> bool:
        """Whether a page shows the buttons, or has."""
        return self._num_answers > 0

    @property
    def _heard(self) -> dict[str, int]:
        return {"presses": self._num_presses, "answers": self._num_answers}

    def tell(self, bar: Bar, note: str, meant: Meant) -> None:
        """Show this in all bars; a message leaves the kernel if it is new. Any thread may call."""
        with self._lock:
            left = bar.idle_left_s
            stops_at = 0.0 if left is None else time.monotonic() + left
            view = {**asdict(bar), "note": note, "meant": meant, **self._heard}
            same = {**self.view, "idle_left_s": left} == {**view, "idle_left_s": left}
            if same and abs(stops_at - self._stops_at) < _SAME_DEADLINE_S:
                return
            self._stops_at = stops_at
            self.view = view

    def _receive(self, _widget: object, content: dict[str, Any], _buffers: object) -> None:
        """Handle a message from the browser, in a thread of the kernel's choice."""
        press = content.get("press")
        if press == "hello":
            self._num_answers += 1
            self._on_press("", None)
        elif press in ("interrupt", "stop"):
            self._num_presses += 1
            meant = content.get("meant")
            self._on_press(press, None if meant is None else tuple(meant))
