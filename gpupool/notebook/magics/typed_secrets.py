"""Take a secret that was typed into a cell out of IPython's history. Runs on the client.

IPython notes a cell before it runs it: in `In` and `_ih`, in `_i` and its like, and in a database
file in the user's profile that the next sessions search. The cell itself is the notebook's.
"""

from __future__ import annotations

import re
import sqlite3
from typing import Any

from gpupool.core.errors import OptionsError

_TYPED = re.compile(r"""(?<!\S)["']?([A-Za-z_]\w*)\s?=\s*["']?[^\s"']""")
NOTE = "# A cell with a value typed after %gpupool stood here."


def refuse_typed_value(shell: Any, line: str) -> None:
    """Raise an error if NAME=value stands on a magic's line, after the history has forgotten it.

    Raises:
        OptionsError: it does. The value is not repeated.
    """
    typed = _TYPED.search(line)
    if typed is None:
        return
    name = typed[1]
    where = (
        "" if forget_cell(shell) else " and in IPython's history file, which could not be changed"
    )
    raise OptionsError(
        f"{name}=...: name the variable only, its value is taken from the notebook's environment: "
        f'os.environ["{name}"] = getpass.getpass() asks for it and keeps it nowhere else. '
        f"The typed value is still in this cell{where}: delete it there.",
        "value",
        name,
    )


def forget_cell(shell: Any) -> bool:
    """Put a note in the place of the running cell wherever IPython keeps it; whether it could."""
    manager = shell.history_manager
    kept = manager.input_hist_raw[-1] if manager and manager.input_hist_raw else ""
    if not kept.strip():
        return True
    manager.input_hist_raw[-1] = manager.input_hist_parsed[-1] = NOTE
    for name in ("_i00", "_i", "_ii", "_iii"):
        if getattr(manager, name, None) == kept:
            setattr(manager, name, NOTE)
    for name, value in list(shell.user_ns.items()):
        # `_i`, `_ii`, `_iii` and `_i12` are variables of the notebook as well.
        if name.startswith("_i") and isinstance(value, str) and value == kept:
            shell.user_ns[name] = NOTE
    return _forget_in_database(manager, kept)


def _forget_in_database(manager: Any, kept: str) -> bool:
    """Put the note in what waits to be written, and in the file if it is written already."""
    # IPython's thread writes the cache to the file, at any moment.
    with manager.db_input_cache_lock:
        waiting = manager.db_input_cache
        waiting[:] = [(n, NOTE, NOTE) if raw == kept else (n, src, raw) for n, src, raw in waiting]
        if not manager.enabled:
            return True
        try:
            with manager.db:
                # Overwritten, where SQLite would only mark the place as free.
                manager.db.execute("PRAGMA secure_delete = ON")
                manager.db.execute(
                    "UPDATE history SET source = ?, source_raw = ?"
                    " WHERE session = ? AND source_raw = ?",
                    (NOTE, NOTE, manager.session_number, kept),
                )
        except sqlite3.Error:  # locked for seconds by another notebook, read-only, broken
            return False
    return True
