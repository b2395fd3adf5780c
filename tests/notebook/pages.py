"""What a page does with live HTML: takes in news of its parts, and sends what is pressed."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

from tests.notebook.kernel import Kernel

TIMEOUT_S = 30.0


class Page:
    """Follows the newest live HTML and its output, and sends what is pressed: from a `subshell`, as
    JupyterLab does, it is heard while a cell blocks.
    """

    def __init__(self, kernel: Kernel, subshell: bool = False) -> None:
        self._client = kernel.client
        self._comm_id = self._display_id = ""
        self._subshell_id = self._new_subshell() if subshell else ""
        self.uid = ""
        self.state: dict[str, Any] = {}
        self.html = ""  # of its output, as it was drawn last

    @property
    def parts(self) -> dict[str, str]:
        found: dict[str, str] = self.state.get("parts", {})
        return found

    def take(self, kind: str, content: dict[str, Any]) -> None:
        data = content.get("data", {})
        state = data.get("state", {})
        if kind == "comm_open" and "uid" in state:
            self._comm_id, self.uid = content["comm_id"], state["uid"]
            self.state = state["state"]
        elif content.get("comm_id") == self._comm_id and data.get("method") == "custom":
            news = data["content"]
            self.state |= {**news, "parts": {**self.parts, **news.get("parts", {})}}
        html, display_id = data.get("text/html", ""), content.get("transient", {}).get("display_id")
        if self.uid and (f"gpl-{self.uid}" in html or display_id == self._display_id):
            self.html, self._display_id = html, display_id

    def send(self, press: str, meant: Any = None) -> None:
        """Tell the kernel, and what it means; something earlier if the page knows no more."""
        known = self.state.get("meant") if meant is None else meant
        data = {"method": "custom", "content": {"press": press, "meant": known}}
        content = {"comm_id": self._comm_id, "data": data}
        message = self._client.session.msg("comm_msg", content)
        if self._subshell_id:
            message["header"]["subshell_id"] = self._subshell_id
        self._client.shell_channel.send(message)

    def run(self, code: str, until: Callable[[Page], bool]) -> None:
        self._client.execute(code)
        self.follow(until)

    def follow(self, until: Callable[[Page], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not until(self):
            assert time.monotonic() < deadline, f"it did not come; the last state: {self.state}"
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
