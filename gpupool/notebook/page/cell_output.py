"""One output in the cell that made it, changed from any thread and at any time. Client."""

from __future__ import annotations

import uuid
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import publish_display_data


class Place:
    """An output of the cell that was running when it was first used; empty until then.

    What is put there when another cell runs already still appears under its own. One that is
    `beside` another place belongs to the cell of that.
    """

    def __init__(self, beside: Place | None = None) -> None:
        # Our own, so that an update finds the display whichever cell runs then.
        self._display_id = uuid.uuid4().hex
        self._is_shown = False
        self._beside = beside
        self._kernel: Any = None
        self._parent: dict[str, Any] | None = None

    def bind(self) -> None:
        """Belong to the cell that runs now, unless it belongs to one already."""
        if self._parent is not None:
            return
        if self._beside is not None:
            self._beside.bind()
            self._kernel, self._parent = self._beside._kernel, self._beside._parent
            return
        shell: Any = get_ipython()
        self._kernel = getattr(shell, "kernel", None)
        parent = self._kernel.get_parent("shell") if self._kernel is not None else None
        if parent:
            self._parent = {"header": parent["header"]}  # without the source of the cell

    @property
    def is_shown(self) -> bool:
        """Whether something has been put there."""
        return self._is_shown

    @property
    def is_current(self) -> bool:
        """Whether its cell is the one that runs, or ran last."""
        if self._kernel is None or self._parent is None:
            return True
        latest = self._kernel.get_parent("shell").get("header", {})
        return bool(latest.get("msg_id") == self._parent["header"].get("msg_id"))

    def show(self, data: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
        """Put a mime bundle there, in the place of what was there before."""
        self.bind()
        transient = {"display_id": self._display_id}
        if self._is_shown or self.is_current:
            # of an update the front end knows the place by its name
            publish_display_data(data, metadata or {}, transient=transient, update=self._is_shown)
        else:
            content = {"data": data, "metadata": metadata or {}, "transient": transient}
            self.send("display_data", content)
        self._is_shown = True

    def send(
        self,
        kind: str,
        content: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        buffers: list[bytes] | None = None,
    ) -> None:
        """Send a message to the front end as if its cell had; does nothing in a terminal."""
        self.bind()
        if self._kernel is not None:
            # Past ipykernel's display publisher, which uses the cell that runs now as the parent.
            self._kernel.session.send(
                self._kernel.iopub_socket,
                kind,
                content,
                parent=self._parent,
                metadata=metadata,
                buffers=buffers,
                ident=kind.encode(),
            )
