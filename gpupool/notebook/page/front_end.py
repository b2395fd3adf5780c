"""Where the user sits, in a notebook or at a terminal, and an output there. Runs on the client.

Asked by threads that show something, too, while the main thread may be importing ipyparallel. Two
threads that import parts of IPython at one time can be in each other's way, and one of them then
fails. So nothing of it is imported here that is not there already.
"""

from __future__ import annotations

import sys
import uuid
from typing import Any


def in_notebook() -> bool:
    """Whether displays can be drawn again here, as they cannot on a terminal."""
    return getattr(_shell(), "kernel", None) is not None


def has_reader() -> bool:
    """Whether somebody may look at displays while the cell runs.

    Nobody does where a program executes a file: nbclient, so nbconvert and papermill too, keeps the
    last state alone, and logs what comes on a stream.
    """
    kernel = getattr(_shell(), "kernel", None)
    request = kernel.get_parent("shell") if kernel is not None else {}
    # Known at once. That a widget gets no answer is no sign: a kernel that is busy hears none.
    return bool(request.get("content", {}).get("allow_stdin", True))


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
        if self._parent:
            return
        if self._beside is not None:
            self._beside.bind()
            self._kernel, self._parent = self._beside._kernel, self._beside._parent
            return
        self._kernel = getattr(_shell(), "kernel", None)
        if self._kernel is not None and (parent := self._kernel.get_parent("shell")):
            self._parent = {"header": parent["header"]}  # without the source of the cell

    def show(self, data: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
        """Put a mime bundle there, in the place of what was there before."""
        self.bind()
        shown: dict[str, Any] = {"data": data, "metadata": metadata or {}}
        shown["transient"] = {"display_id": self._display_id}
        if self.is_shown or self._is_current():
            # of an update the front end knows the place by its name
            _shell().display_pub.publish(**shown, update=self.is_shown)
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


def _shell() -> Any:
    loaded: Any = sys.modules.get("IPython.core.getipython")
    get_ipython = getattr(loaded, "get_ipython", None)  # None while it is being imported
    return get_ipython() if get_ipython is not None else None
