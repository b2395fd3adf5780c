"""One output in the cell that made it, changed from any thread and at any time. Client."""

from __future__ import annotations

import uuid
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import publish_display_data


class Place:
    """An output of the cell that was running when it was first used; empty until then.

    What is put there when another cell runs already still appears under its own. One that is
    `beside` another place belongs to the cell of that. `is_shown`: something has been put there.
    """

    def __init__(self, beside: Place | None = None) -> None:
        # Our own, so that an update finds the display whichever cell runs then.
        self._display_id = uuid.uuid4().hex
        self.is_shown = False
        self._beside = beside
        self._kernel: Any = None
        self._parent: dict[str, Any] = {}

    def bind(self) -> None:
        """Belong to the cell that runs now, unless it belongs to one already."""
        if self._parent:
            return
        if self._beside is not None:
            self._beside.bind()
            self._kernel, self._parent = self._beside._kernel, self._beside._parent
            return
        self._kernel = getattr(get_ipython(), "kernel", None)
        if self._kernel is not None and (parent := self._kernel.get_parent("shell")):
            self._parent = {"header": parent["header"]}  # without the source of the cell

    def show(self, data: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
        """Put a mime bundle there, in the place of what was there before."""
        self.bind()
        shown: dict[str, Any] = {"data": data, "metadata": metadata or {}}
        shown["transient"] = {"display_id": self._display_id}
        if self.is_shown or self._is_current():
            # of an update the front end knows the place by its name
            publish_display_data(**shown, update=self.is_shown)
        else:
            # Past ipykernel's display publisher, which uses the cell that runs now as the parent.
            kind, socket = "display_data", self._kernel.iopub_socket
            send = self._kernel.session.send
            send(socket, kind, shown, parent=self._parent, ident=kind.encode())
        self.is_shown = True

    def _is_current(self) -> bool:
        """Whether its cell is the one that runs, or ran last."""
        if not self._parent:
            return True
        latest = self._kernel.get_parent("shell").get("header", {})
        return bool(latest.get("msg_id") == self._parent["header"].get("msg_id"))
