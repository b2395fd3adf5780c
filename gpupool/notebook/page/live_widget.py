"""What the models of our widgets share: one module, and an ear while a cell runs. Client."""

from __future__ import annotations

from typing import Any

import anywidget


class LiveWidget(anywidget.AnyWidget):
    """A model whose buttons are heard while a cell runs.

    ipykernel 7.4 answers a comm on the shell that last sent on it. That would be the main shell,
    busy with the cell, and a press would wait until the cell has ended. Without the note that it
    keeps a press arrives on the subshell that JupyterLab sent it to. Other versions have no note.
    """

    def open(self) -> None:
        """Register the model with the browser."""
        super().open()
        self._answer_on_any_shell()

    def send_state(self, key: Any = None) -> None:
        """Send some traits, or all of them.

        A page that is loaded again while a cell runs asks each model for its state, and takes the
        first update that answers for all of it: a thread's update of one trait must not be that.
        """
        super().send_state(None if self._is_asked() else key)

    def _is_asked(self) -> bool:
        """Whether what is sent now answers a page that asked for the state."""
        kernel = getattr(self.comm, "kernel", None)
        content = kernel.get_parent().get("content", {}) if kernel is not None else {}
        data = content.get("data")  # of a message to a comm; a cell has its code instead
        return isinstance(data, dict) and data.get("method") == "request_state"

    def _send(self, *args: Any, **kwargs: Any) -> None:
        super()._send(*args, **kwargs)
        self._answer_on_any_shell()

    def _answer_on_any_shell(self) -> None:
        if self.comm is not None:
            self.comm.__dict__.pop("_reply_subshell_id", None)
