"""Buttons in HTML that a notebook keeps: the kernel's half of a model without a view. Client.

The browser's half (`static/page_buttons.js` and what the model adds) finds the HTML in the page by
a name. So the saved notebook has HTML without buttons; they are there as long as the kernel is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import anywidget
import traitlets

Meant = tuple[int, ...] | None
"""What a press is meant for: the "meant" of the view that the page had, if there was one."""

STATIC = Path(__file__).parents[1] / "static"


def in_one_module(*names: str) -> str:
    """The texts of static files as one: it is loaded from a blob, and could import none of them."""
    return "\n".join((STATIC / name).read_text("utf-8") for name in names)


class PageButtons(anywidget.AnyWidget):
    """Buttons in all HTML that is named `uid`.

    `on_press(press, meant)` is called with one of `names`, or with "" when a page wants an answer,
    which is a new `view`; in a thread of the kernel's choice, perhaps while the main thread is in
    the middle of something: it may only put the words somewhere.
    """

    names: ClassVar[tuple[str, ...]] = ()
    _css = in_one_module("page_buttons.css")

    uid = traitlets.Unicode().tag(sync=True)
    # what is shown and: "presses", how many have been heard; "answers", how many pages have asked
    # whether anybody is there
    view = traitlets.Dict().tag(sync=True)

    def __init__(self, uid: str, on_press: Callable[[str, Meant], None]) -> None:
        self._on_press = on_press
        self._num_presses = self._num_answers = 0
        super().__init__(uid=uid, view=self.heard)
        self.on_msg(self._receive)

    @property
    def is_seen(self) -> bool:
        """Whether a page shows the buttons, or has."""
        return self._num_answers > 0

    @property
    def heard(self) -> dict[str, Any]:
        """What every view has to have besides: it tells pages that they have been heard."""
        return {"presses": self._num_presses, "answers": self._num_answers}

    def open(self) -> None:
        """Register the model with the browser."""
        super().open()
        self._answer_on_any_shell()

    def close(self) -> None:
        """Have the browser forget the model, and the layout that every widget has."""
        if self.comm is not None:
            self.layout.close()
        super().close()

    def _receive(self, _widget: object, content: dict[str, Any], _buffers: object) -> None:
        """Handle a message from the browser, in a thread of the kernel's choice."""
        press = content.get("press")
        if press == "hello":
            self._num_answers += 1
            self._on_press("", None)
        elif press in self.names:
            self._num_presses += 1
            meant = content.get("meant")
            self._on_press(press, None if meant is None else tuple(meant))

    def _send(self, *args: Any, **kwargs: Any) -> None:
        super()._send(*args, **kwargs)
        self._answer_on_any_shell()

    def _answer_on_any_shell(self) -> None:
        """Hear the buttons while a cell runs: see `TrainingMonitor`."""
        if self.comm is not None:
            self.comm.__dict__.pop("_reply_subshell_id", None)
