"""HTML in the outputs of cells that the kernel keeps up to date, with buttons it hears. Client.

What a notebook keeps is this HTML, from its first moment: it needs no widget. A model without a
view brings news of its parts into every page that shows them (`static/live.js`), and what is
pressed there back. A page that is loaded again finds the model in the kernel.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from html import escape
from typing import Any

import anywidget
import traitlets

from gpupool.notebook.page.markup import static_text

Meant = tuple[int, ...]
BUTTONS = ("buttons", "interrupt")  # parts


class LiveHtml(anywidget.AnyWidget):
    """Parts of HTML by name, in all elements that `part` has made of them.

    `on_press(press, meant)` is called with the name of a button, and what the newest state that its
    page had said of what it is meant for: in a thread of the kernel's choice, perhaps while the
    main thread is in the middle of something. So it may only set an Event, or put the words
    somewhere. "hello", of a page that is new, is not passed on.
    """

    _esm = static_text("plots.js", "stills.js", "live.js")
    _css = static_text("live.css")

    uid = traitlets.Unicode().tag(sync=True)
    state = traitlets.Dict().tag(sync=True)  # only what `get_state` says of it is ever sent

    def __init__(self, on_press: Callable[[str, Meant], None]) -> None:
        # Before the base class, which registers the model: a page may answer at once.
        self._on_press = on_press
        self._lock = threading.Lock()
        self._told: dict[str, Any] = {"parts": {}, "presses": 0, "answers": 0}
        super().__init__(uid=secrets.token_hex(4))
        self.on_msg(self._receive)

    @property
    def is_seen(self) -> bool:
        """Whether a page shows it, or has."""
        return bool(self._told["answers"])

    def part(self, name: str, inner: str = "", looks: str = "") -> str:
        """The element of a part, as often as it is wanted; `looks` are its CSS classes.

        Buttons are filled in only while a kernel answers. Until then it says `inner`.
        """
        live = " data-live" if name in BUTTONS else ""
        classes = f"gpl-{self.uid} {looks}".strip()
        return f'<div class="{classes}" data-part="{name}"{live}>{inner}</div>'

    def tell(self, **news: Any) -> None:
        """Send what of the news the pages do not know yet; any thread may call.

        "parts", the HTML of some; "gone", what stands in the place of some when the kernel has
        ended, and its "text"; "plots", as JSON; "meant", for the presses to come; "still", the mime
        bundle that takes the place of all this at the end.
        """
        with self._lock:
            known = self._told["parts"]
            parts = {n: html for n, html in news.pop("parts", {}).items() if known.get(n) != html}
            changed = {name: new for name, new in news.items() if self._told.get(name) != new}
            self._told |= {**changed, "parts": {**known, **parts}}
            if parts:
                changed["parts"] = parts
            if changed:
                self.send(changed)

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """The synced traits: what a page that is opened, or loaded again, asks for."""
        state: dict[str, Any] = super().get_state(key, drop_defaults)
        return {**state, "state": dict(self._told)} if "state" in state else state

    def open(self) -> None:
        super().open()
        self._answer_on_any_shell()

    def _send(self, *args: Any, **kwargs: Any) -> None:
        super()._send(*args, **kwargs)
        self._answer_on_any_shell()

    def _answer_on_any_shell(self) -> None:
        """Have presses heard while a cell runs.

        ipykernel 7.4 answers a comm on the shell that last sent on it. That would be the main
        shell, busy with the cell, and a press would wait until the cell has ended. Without the note
        that it keeps a press arrives on the subshell that JupyterLab sent it to. Other versions
        have no note.
        """
        if self.comm is not None:
            self.comm.__dict__.pop("_reply_subshell_id", None)

    def _receive(self, _widget: object, content: dict[str, Any], _buffers: object) -> None:
        press = content.get("press")
        if press == "hello":
            self.tell(answers=self._told["answers"] + 1)
        elif isinstance(press, str):
            # Before the lock, which a thread that sends may hold.
            self._on_press(press, tuple(content.get("meant") or ()))
            self.tell(presses=self._told["presses"] + 1)


def button(press: str, label: str, *, title: str = "", looks: str = "", off: bool = False) -> str:
    """A button of a part; `looks` are CSS classes.

    "gpl-grave" ends something; the press of a "gpl-kernel" that is not heard becomes one of the
    notebook's own button; a "gpl-now" may be drawn again at any moment, so it is heard when the
    pointer goes down.
    """
    disabled = " disabled" if off else ""
    return (
        f'<button type="button" class="gpl-button {looks}" data-press="{press}" '
        f'title="{escape(title)}"{disabled}>{escape(label)}</button>'
    )


def hint(note: str = "") -> str:
    """Where the page says what becomes of a press; until then the kernel's `note` stands there."""
    return f'<span class="gpl-hint" role="status">{escape(note)}</span>'
