"""Where the user sits: in a notebook, or at a terminal. Runs on the client.

Asked by threads that show something, too, while the main thread may be importing ipyparallel. Two
threads that import parts of IPython at one time can be in each other's way, and one of them then
fails. So nothing of it is imported here that is not there already.
"""

from __future__ import annotations

import sys
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


def log_line(text: str) -> None:
    """Write a line of what displays show here, for the log of a program that executes a file.

    On stdout: pages show what comes on stderr as an error.
    """
    if not has_reader():
        print(text, flush=True)


def _shell() -> Any:
    """IPython's shell; None where there is none."""
    loaded: Any = sys.modules.get("IPython.core.getipython")
    get_ipython = getattr(loaded, "get_ipython", None)  # None while it is being imported
    return get_ipython() if get_ipython is not None else None
