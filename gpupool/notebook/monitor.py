"""The live picture of a training: the kernel's half of a widget. Runs on the client.

The browser's half is `static/monitor.js`. New points travel as small custom messages; two synced
traits, refreshed now and then, hold the whole picture for pages that are opened later.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from gpupool.notebook import words
from gpupool.notebook.curves import Curves
from gpupool.training.history import OVER, TrainingHistory

MESSAGE_EVERY_S = 0.1
WHOLE_EVERY_S = 2.0
STATIC = Path(__file__).parent / "static"


class TrainingMonitor(anywidget.AnyWidget):
    """Plots, table, progress bar and Stop button of one training.

    Feed it with `update`. `on_stop` is called when Stop is pressed, in whichever thread the kernel
    happens to handle messages (it differs from version to version), perhaps while the main
    thread is in the middle of something: it may only set an Event.
    """

    _esm = STATIC / "monitor.js"
    _css = STATIC / "monitor.css"

    status = traitlets.Unicode("starting").tag(sync=True)
    view = traitlets.Dict().tag(sync=True)
    # JSON in a string: ipywidgets walks through nested lists in search of binary buffers, which
    # would cost more than all the rest.
    lines = traitlets.Unicode("{}").tag(sync=True)

    def __init__(
        self,
        on_stop: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_stop = on_stop
        self._clock = clock
        self._lock = threading.Lock()
        self._curves = Curves()
        self._stop_pressed = False
        self._sent_at = self._whole_at = -WHOLE_EVERY_S
        self._text = "starting"
        super().__init__(view=_view(TrainingHistory(), "starting", self._curves))
        self.on_msg(self._receive)

    def update(self, history: TrainingHistory) -> None:
        """Show the state of `history`: from any thread, at any rate.

        At most ten messages a second leave the kernel, and one for each change of the status or of
        the notice.
        What comes in between waits for the next call.
        """
        with self._lock:
            now = self._clock()
            self._text = history.line()
            status = self._status_of(history)
            changed = status != self.status or history.notice != self.view["notice"]
            if not changed and now - self._sent_at < MESSAGE_EVERY_S:
                return
            self._sent_at = now
            new = self._curves.take(history)
            view = _view(history, status, self._curves)
            if changed or now - self._whole_at >= WHOLE_EVERY_S:
                self._whole_at = now
                with self.hold_sync():  # one message instead of three
                    self.status, self.view = status, view
                    self.lines = json.dumps(
                        self._curves.whole(), separators=(",", ":"), allow_nan=False
                    )
            else:
                self.send({"view": view, "new": new})

    def open(self) -> None:
        """Register the widget with the browser."""
        super().open()
        self._answer_on_any_shell()

    def _status_of(self, history: TrainingHistory) -> str:
        """The status to show: Stop has been pressed before the training can have noticed it."""
        return history.status if history.is_over or not self._stop_pressed else "stopping"

    def _receive(self, _widget: object, content: dict[str, Any], _buffers: object) -> None:
        """Handle a message from the browser, in a thread of the kernel's choice."""
        if content.get("press") != "stop":
            return
        self._on_stop()
        with self._lock:
            self._stop_pressed = True
            if self.status not in OVER:
                self.status = "stopping"  # the browser takes this for the acknowledgement

    def _send(self, *args: Any, **kwargs: Any) -> None:
        super()._send(*args, **kwargs)
        self._answer_on_any_shell()

    def _answer_on_any_shell(self) -> None:
        """Keep the Stop button working while a cell runs.

        ipykernel 7.4 answers a comm on the shell that last sent on it. That would be the main
        shell, busy with the cell, and the press of Stop would wait until the cell has ended.
        Without this note the press arrives on the subshell that JupyterLab sent it to. Other
        versions do not have the note.
        """
        if self.comm is not None:
            self.comm.__dict__.pop("_reply_subshell_id", None)

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle or {}, {})
        return {**data, "text/plain": self._text}, metadata


def _view(history: TrainingHistory, status: str, curves: Curves) -> dict[str, Any]:
    """Everything but the points: what the browser writes and how it scales."""
    return {
        "headline": words.headline(history, status),
        "notice": history.notice,
        "remaining": words.remaining(history),
        "progress": history.progress,
        "table": words.table(history),
        "latest": words.latest(history),
        "axes": curves.axes(history),
    }
