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

    def _send(self, *args: Any, **kwargs: Any) -> None:
        super()._send(*args, **kwargs)
        self._answer_on_any_shell()

    def _answer_on_any_shell(self) -> None:
        if self.comm is not None:
            self.comm.__dict__.pop("_reply_subshell_id", None)
