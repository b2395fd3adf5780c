"""The live picture of a training or of a loop: the kernel's half of a widget. Runs on the client.

The browser's half is `static/monitor.js`, after the other files of one module: see `_esm`.
What has changed travels as small custom messages; two synced traits, refreshed now and then, hold
the whole picture for pages that are opened later.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import traitlets

from gpupool.core.wire.events import OVER
from gpupool.notebook.monitor.picture import History, notice_of, state_of
from gpupool.notebook.page.live_widget import LiveWidget
from gpupool.notebook.page.markup import static_text
from gpupool.training.history import TrainingHistory

MAX_POINTS = 600  # of a curve, when all of it is sent
MESSAGE_EVERY_S = 0.1
WORDS_EVERY_S = 0.5
WHOLE_EVERY_S = 5.0
QUIET_S = 1.0  # nothing has come for so long: all that there is goes out
LOST_SHARE = 0.01  # of the time, at most, goes into pictures for a kernel that may die
NOTHING, WHOLE, WORDS, POINTS = range(4)  # what is yet to be sent: this, and what stands before it


class TrainingMonitor(LiveWidget):
    """Plots, table, progress bar and Stop button of one training or loop.

    Feed it with `update`. `on_stop` is called when Stop is pressed, in whichever thread the kernel
    happens to handle messages (it differs from version to version), perhaps while the main
    thread is in the middle of something: it may only set an Event.
    """

    _esm = static_text("plots.js", "life.js", "monitor.js")
    _css = static_text("plots.css", "monitor.css")

    status = traitlets.Unicode("starting").tag(sync=True)
    view = traitlets.Dict().tag(sync=True)
    # JSON in a string: ipywidgets walks through nested lists in search of binary buffers, which
    # would cost more than all the rest.
    lines = traitlets.Unicode("{}").tag(sync=True)
    # What is left of it in the end, as `leave` says.
    still = traitlets.Dict().tag(sync=True)
    # What is left of it if this kernel dies now: only the page can put it into the notebook then.
    lost = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        on_stop: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        history: History | None = None,
        lost_picture: Callable[[History], dict[str, Any]] = lambda history: {},
    ) -> None:
        self._history = TrainingHistory() if history is None else history
        self._on_stop = on_stop
        self._clock = clock
        self._lock = threading.RLock()
        self._state = state_of(self._history, MAX_POINTS)
        self._stop_pressed = False
        self._sent_at = self._words_at = self._whole_at = -WHOLE_EVERY_S
        self._lost_picture, self._lost_due = lost_picture, 0.0
        self._heard_at = clock()
        self._unsent = NOTHING
        self._timer: threading.Timer | None = None
        self._timer_due = math.inf
        # Last: it sends the state by `get_state`, which needs all of the above.
        super().__init__(view=self._state.view, lines=self._state.lines())
        self.lost = {"model_id": self.model_id, "data": lost_picture(self._history)}
        self.on_msg(self._receive)

    def update(self, history: History) -> None:
        """Show the state of `history`: from any thread, at any rate.

        At most ten messages a second leave the kernel, and one for each change of the status or of
        the notice. What comes in between follows in a moment, also when nothing else comes.
        """
        with self._lock:
            self._history, self._heard_at, self._unsent = history, self._clock(), POINTS
            self._send_what_is_due()

    def _send_what_is_due(self) -> None:
        """Send it, and have a timer come back for the rest: nothing else may come for minutes."""
        history, now = self._history, self._clock()
        status = self._status_of(history)
        if self._is_urgent(history, status):
            self._send_whole(history, status, now)
        elif now >= self._due:
            if self._unsent == WHOLE or now - self._whole_at >= WHOLE_EVERY_S:
                self._send_whole(history, status, now)
            else:
                self._send_news(history, status, now)
        if self._due < self._timer_due:
            self._set_timer(now)

    @property
    def _due(self) -> float:
        """When what is unsent should go out."""
        quiet = max(self._heard_at + QUIET_S, self._lost_due)
        points, words = self._sent_at + MESSAGE_EVERY_S, self._words_at + WORDS_EVERY_S
        return (math.inf, quiet, words, points)[self._unsent]

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = self._due
        self._timer = threading.Timer(max(0.0, self._timer_due - now), self._on_time)
        self._timer.daemon = True
        self._timer.start()

    def _on_time(self) -> None:
        with self._lock:
            self._timer_due = math.inf
            try:
                self._send_what_is_due()
            # The run adds to its history in another thread, and may just be adding a rank. It then
            # calls `update`, which sends this as well.
            except RuntimeError:
                return

    def _is_urgent(self, history: History, status: str) -> bool:
        """Whether there is more to show than numbers."""
        notice = notice_of(history)
        is_another = self._state.is_of_another(history)
        return is_another or status != self.status or notice != self._state.view["notice"]

    def _send_whole(self, history: History, status: str, now: float) -> None:
        self._state.take(history, status)
        self._sent_at = self._words_at = self._whole_at = now
        with self.hold_sync():  # one message instead of four
            self.status = status
            whole = self._whole()
            self.view, self.lines = whole["view"], whole["lines"]
            self._unsent = NOTHING if history.is_over or self._keep_picture(now) else WHOLE

    def _keep_picture(self, now: float) -> bool:
        """Renew the picture for a kernel that dies, unless the last one was made just now."""
        if now < self._lost_due:
            return False
        self.lost = {"model_id": self.model_id, "data": self._lost_picture(self._history)}
        # What it costs grows with the history, unlike all else here.
        self._lost_due = now + (self._clock() - now) / LOST_SHARE
        return True

    def _send_news(self, history: History, status: str, now: float) -> None:
        self._sent_at = now
        if now - self._words_at < WORDS_EVERY_S:
            changed, new = self._state.take_points(history)
            self._unsent = WORDS
        else:
            changed, new = self._state.take(history, status)
            self._words_at, self._unsent = now, WHOLE
        self.send({"view": changed, "new": new})

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """The synced traits; all of them (no `key`) with everything that was sent so far.

        That is what a page that is opened, or loaded again, asks for. Otherwise the traits are some
        seconds old, and older where nothing was sent since, as during validation.
        """
        state: dict[str, Any] = super().get_state(key, drop_defaults)
        if key is None:
            # Not by the traits: each would be sent alone, before this.
            with self._lock:
                state |= self._whole()
        return state

    def _whole(self) -> dict[str, Any]:
        """The traits that hold the whole picture, with the time as it is now."""
        view, clock = self._state.view, self._state.view.get("clock")
        if clock and clock["running"]:
            since_s = self._clock() - self._words_at
            left_s = clock["remaining_s"]
            now = {
                "elapsed_s": clock["elapsed_s"] + since_s,
                "remaining_s": left_s and max(0.0, left_s - since_s),
            }
            view = {**view, "clock": clock | now}
        return {"view": view, "lines": self._state.lines()}

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
