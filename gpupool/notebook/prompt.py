"""Lines that are drawn while IPython waits for input on a terminal: below its prompt. Client.

The prompt has the screen then, and would be drawn over.
"""

from __future__ import annotations

import sys
from typing import Any

from IPython.core.getipython import get_ipython

from gpupool.core.terminal import hand_over, take_back


def shares_screen() -> bool:
    """Whether lines may be drawn although no cell waits: in a script, and below IPython's prompt.

    Other prompts cannot be told when they wait, or be drawn anew.
    """
    shell = get_ipython()
    if shell is None:
        return not hasattr(sys, "ps1")
    if getattr(shell, "pt_app", None) is None:  # as with --simple-prompt
        return False
    known = shell.events.callbacks["post_run_cell"]
    if not any(isinstance(getattr(hook, "__self__", None), _Toolbar) for hook in known):
        toolbar = _Toolbar(shell)
        shell.events.register("pre_run_cell", toolbar.cell_begins)
        shell.events.register("post_run_cell", toolbar.cell_ended)
    return True


class _Toolbar:
    """The last line of the screen, while IPython's prompt waits."""

    def __init__(self, shell: Any) -> None:
        self._session = shell.pt_app
        self._users = self._session.bottom_toolbar

    def cell_begins(self, info: object) -> None:
        """A cell runs: lines are drawn as in a script."""
        take_back()
        self._session.bottom_toolbar = self._users

    def cell_ended(self, result: object) -> None:
        """The prompt comes next."""
        self._users = self._session.bottom_toolbar
        hand_over(self._show)

    def _show(self, text: str) -> None:
        """Show this; from any thread."""
        self._session.bottom_toolbar = text or self._users
        self._session.app.invalidate()
