"""The live picture of a training or of a loop in a notebook. Runs on the client."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable

from gpupool.notebook.monitor import picture
from gpupool.notebook.monitor.curves import TrainingCurves
from gpupool.notebook.monitor.picture import Board, History, board_of, header
from gpupool.notebook.page.front_end import Place
from gpupool.notebook.page.live_html import LiveHtml, Meant, button, hint

EVERY_S = 0.5  # a message with what is new; a new status at once
IMAGE_EVERY_S = 5.0  # a new image in it, of which a page makes use when the kernel dies
# The output itself, for the file; a page draws all of it again then. Where none has answered,
# nobody sees anything else.
OUTPUT_EVERY_S, UNSEEN_EVERY_S = 60.0, 10.0


class LiveMonitor:
    """An output of the cell that is kept up to date until the end, when its picture stays.

    Call it with the history as often as there is news, from any thread. `on_stop` is called when
    Stop is pressed, in whichever thread the kernel handles messages: it may only set an Event.
    """

    def __init__(
        self, on_stop: Callable[[], None], history: History, place: Place | None = None
    ) -> None:
        self._on_stop, self._history = on_stop, history
        self._curves = TrainingCurves()
        self._place = Place() if place is None else place
        self._live = LiveHtml(self._press)
        self._lock = threading.RLock()
        self._stop_pressed = False
        self._told = ""  # the last status
        self._still: dict[str, str] = {}
        self._image = ""
        self._output_at, self._image_at = -OUTPUT_EVERY_S, -IMAGE_EVERY_S
        self._wake = threading.Event()
        self(history)
        threading.Thread(target=self._run, name="gpupool-monitor", daemon=True).start()

    def __call__(self, history: History) -> None:
        """Show the state of `history`: a new status now, all else soon."""
        with self._lock:
            self._history = history
            self._is_new = self._image_is_old = True
            # A loop may report even after the end of its cell.
            if self._still or self._status() != self._told:
                self._draw()

    def _run(self) -> None:
        while not self._still:
            self._wake.wait(EVERY_S)
            self._wake.clear()
            # The run adds to its history in another thread, and may just be adding a rank.
            with self._lock, contextlib.suppress(RuntimeError):
                if self._is_new or self._status() != self._told or self._image_is_due():
                    self._draw()
                    self._is_new = False

    def _status(self) -> str:
        """The status to show: Stop has been pressed before the training can have noticed it."""
        is_over = self._history.is_over
        return self._history.status if is_over or not self._stop_pressed else "stopping"

    def _image_is_due(self) -> bool:
        return self._image_is_old and time.monotonic() - self._image_at >= IMAGE_EVERY_S

    def _draw(self) -> None:
        now, self._told = time.monotonic(), self._status()
        board = board_of(self._history, self._told, self._curves)
        if self._still or self._history.is_over:
            html, text = picture.still_html(board), picture.text_of(self._history)
            still = {"text/html": html, "text/plain": text}
            if still != self._still:
                self._still = still
                self._place.show(still)
                # Also for a page that was loaded again meanwhile, which does not know the display.
                self._live.tell(still=still)
            return
        if self._image_is_due():
            self._image_at, self._image_is_old = now, False
            self._image = picture.image_of(board)
        self._live.tell(
            parts={
                **board.parts,
                "plots": self._image,
                "buttons": _buttons(board, is_pressed=self._told == "stopping"),
            },
            gone={"header": header(board.lost, None, "", is_failed=True), "text": board.lost},
            plots=json.dumps(board.plots, separators=(",", ":"), allow_nan=False),
        )
        if now - self._output_at >= (OUTPUT_EVERY_S if self._live.is_seen else UNSEEN_EVERY_S):
            self._output_at = now
            html = picture.live_html(board, self._image, self._live.part)
            self._place.show({"text/html": html, "text/plain": picture.text_of(self._history)})

    def _press(self, _press: str, _meant: Meant) -> None:
        # Without the lock, which a drawing thread may hold: the wish must not wait for a picture.
        self._on_stop()
        self._stop_pressed = True
        self._wake.set()


def _buttons(board: Board, *, is_pressed: bool) -> str:
    if not board.stop:
        return ""
    label = "Stopping…" if is_pressed else board.stop
    return button("stop", label, looks="gpl-grave gpl-kernel", off=is_pressed) + hint()
