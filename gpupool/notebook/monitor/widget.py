"""The live picture of a training or of a loop: the kernel's half of a widget. Runs on the client.

The browser's half is `plots.js`, `explore.js` and `monitor.js` of `static/`. What has changed
travels as small custom messages; two synced traits, refreshed now and then, hold the whole picture
for pages that are opened later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import traitlets

from gpupool.notebook.monitor.picture import History, notice_of, state_of
from gpupool.notebook.page.live_widget import LiveWidget
from gpupool.notebook.page.markup import static_text
from gpupool.training.history import OVER, TrainingHistory

MAX_POINTS = 600  # of a curve, when all of it is sent
MESSAGE_EVERY_S = 0.1
WORDS_EVERY_S = 0.5
WHOLE_EVERY_S = 5.0


class TrainingMonitor(LiveWidget):
    """Plots, table, progress bar and Stop button of one training or loop.

    Feed it with `update`. `on_stop` is called when Stop is pressed, in whichever thread the kernel
    happens to handle messages (it differs from version to version), perhaps while the main
    thread is in the middle of something: it may only set an Event.
    """

    _esm = static_text("plots.js", "explore.js", "monitor.js")
    _css = static_text("plots.css", "monitor.css")

    status = traitlets.Unicode("starting").tag(sync=True)
    view = traitlets.Dict().tag(sync=True)
    # JSON in a string: ipywidgets walks through nested lists in search of binary buffers, which
    # would cost more than all the rest.
    lines = traitlets.Unicode("{}").tag(sync=True)
    # What is left of it in the end, as `leave` says.
    still = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        on_stop: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        history: History | None = None,
    ) -> None:
        self._history = TrainingHistory() if history is None else history
        self._on_stop = on_stop
        self._clock = clock
        self._lock = threading.RLock()
        self._state = state_of(self._history, MAX_POINTS)
        self._stop_pressed = False
        self._sent_at = self._words_at = self._whole_at = -WHOLE_EVERY_S
        # Last: it sends the state by `get_state`, which needs all of the above.
        super().__init__(view=self._state.view, lines=self._state.lines())
        self.on_msg(self._receive)

    def update(self, history: History) -> None:
        """Show the state of `history`: from any thread, at any rate.

        At most ten messages a second leave the kernel, and one for each change of the status or of
        the notice.
        What comes in between waits for the next call.
        """
        with self._lock:
            now = self._clock()
            self._history = history
            status = self._status_of(history)
            is_urgent = self._is_urgent(history, status)
            if not is_urgent and now - self._sent_at < MESSAGE_EVERY_S:
                return
            self._sent_at = now
            if is_urgent or now - self._whole_at >= WHOLE_EVERY_S:
                self._send_whole(history, status, now)
            else:
                self._send_news(history, status, now)

    def _is_urgent(self, history: History, status: str) -> bool:
        """Whether there is more to show than numbers."""
        notice = notice_of(history)
        is_another = self._state.is_of_another(history)
        return is_another or status != self.status or notice != self._state.view["notice"]

    def _send_whole(self, history: History, status: str, now: float) -> None:
        self._state.take(history, status)
        self._whole_at = self._words_at = now
        with self.hold_sync():  # one message instead of three
            self.status = status
            self._refresh()

    def _send_news(self, history: History, status: str, now: float) -> None:
        if now - self._words_at < WORDS_EVERY_S:
            changed, new = self._state.take_points(history)
        else:
            changed, new = self._state.take(history, status)
            self._words_at = now
        self.send({"view": changed, "new": new})

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """The synced traits; all of them (no `key`) with everything that was sent so far.

        That is what a page that is opened, or loaded again, asks for. Otherwise the traits are some
        seconds old, and older where nothing was sent since, as during validation.
        """
        if key is None:
            with self._lock:
                self._refresh()
        state: dict[str, Any] = super().get_state(key, drop_defaults)
        return state

    def _refresh(self) -> None:
        """Have the synced traits hold the whole picture."""
        self.view, self.lines = self._state.view, self._state.lines()

    def leave(self, picture: dict[str, Any]) -> None:
        """The training is over, and `picture`, a mime bundle, takes the place of this widget.

        The kernel cannot put it there in a page that was loaded again meanwhile: that does not know
        the display any more. The browser's half does it in notebooks that let it.
        """
        self.still = {"model_id": self.model_id, "data": picture}

    def _status_of(self, history: History) -> str:
        """The status to show: Stop has been pressed before the training can have noticed it."""
        return history.status if history.is_over or not self._stop_pressed else "stopping"

    def _receive(self, _widget: object, content: dict[str, Any], _buffers: object) -> None:
        """Handle a message from the browser, in a thread of the kernel's choice."""
        if content.get("press") != "stop":
            return
        # Before the lock, which a drawing thread may hold: the wish must not wait for a picture.
        self._on_stop()
        with self._lock:
            self._stop_pressed = True
            if self.status not in OVER:
                self.status = "stopping"  # the browser takes this for the acknowledgement

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle or {}, {})
        return {**data, "text/plain": self._history.line()}, metadata
