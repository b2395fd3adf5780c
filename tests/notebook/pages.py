"""What a page does with a model without a view that puts buttons into HTML of the notebook."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

from tests.notebook.kernel import Kernel

TIMEOUT_S = 30.0


class Page:
    """Follows the newest model and its HTML, and sends what is pressed.

    Args:
        trait: something that the model's first view has, and no other model's.
        name: how the HTML is named.
        subshell: send from a subshell, as JupyterLab does: heard while a cell blocks.
    """

    def __init__(self, kernel: Kernel, trait: str, name: str, subshell: bool = False) -> None:
        self._client = kernel.client
        self._trait, self._name = trait, name
        self._comm_id = ""
        self._subshell_id = self._new_subshell() if subshell else ""
        self.view: dict[str, Any] = {}
        self.status = ""
        self.html = ""  # that was drawn last
        self.is_closed = False

    def take(self, kind: str, content: dict[str, Any]) -> None:
        """Take in what the kernel publishes."""
        state = content.get("data", {}).get("state", {})
        if kind == "comm_open" and self._trait in state.get("view", {}):
            self._comm_id, self.is_closed = content["comm_id"], False
        if content.get("comm_id") == self._comm_id:
            self.is_closed |= kind == "comm_close"
            news = content.get("data", {}).get("content", {}).get("view", {})
            self.view = {**state.get("view", self.view), **news}
            self.status = state.get("status", self.status)
        html = content.get("data", {}).get("text/html", "")
        if self._name in html:
            self.html = html

    def send(self, press: str, view: dict[str, Any] | None = None) -> None:
        """Tell the kernel, and what it means; an earlier `view` if the page knows no more."""
        known = self.view if view is None else view
        pressed = {"press": press, "meant": known.get("meant")}
        data = {"method": "custom", "content": pressed}
        content = {"comm_id": self._comm_id, "data": data}
        message = self._client.session.msg("comm_msg", content)
        if self._subshell_id:
            message["header"]["subshell_id"] = self._subshell_id
        self._client.shell_channel.send(message)

    def run(self, code: str, until: Callable[[Page], bool]) -> None:
        """Run a cell, and read on until something has come."""
        self._client.execute(code)
        self.follow(until)

    def follow(self, until: Callable[[Page], bool]) -> None:
        """Read messages until something has come."""
        deadline = time.monotonic() + TIMEOUT_S
        while not until(self):
            assert time.monotonic() < deadline, f"it did not come; the last view: {self.view}"
            try:
                message = self._client.get_iopub_msg(timeout=0.2)
            except queue.Empty:
                continue
            self.take(message["msg_type"], message["content"])

    def _new_subshell(self) -> str:
        request = self._client.session.msg("create_subshell_request")
        self._client.control_channel.send(request)
        reply = self._client.get_control_msg(timeout=TIMEOUT_S)
        made: str = reply["content"]["subshell_id"]
        return made
