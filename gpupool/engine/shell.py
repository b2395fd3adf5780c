"""The IPython shell that cells run in. Runs on engines.

An engine has one, and so has a notebook that is an inline pool. In a plain Python process an inline
pool makes one of its own when it first needs one, and takes every trace of it away again.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

# What IPython leaves behind in a process: (where, name)
_TRACES: tuple[tuple[Any, str], ...] = (
    (builtins, "__IPYTHON__"),
    (builtins, "display"),
    (sys, "ps1"),
    (sys, "ps2"),
)

_own: Any = None
_folder, _names = "", dict[str, object]()
_traces: list[tuple[Any, str]] = []


def plan_shell(folder: Path, names: Mapping[str, object]) -> None:
    """What a shell of our own gets, should one be needed: a folder for its files, and names."""
    global _folder, _names
    _folder, _names = str(folder), dict(names)


def this_shell() -> Any:
    """The shell of this process: a new one if it has none."""
    global _own
    shell: Any = get_ipython()
    if shell is not None:
        if shell is _own:  # the filters of a script come and go with its `catch_warnings`
            _silence_advice()
        return shell
    main = sys.modules["__main__"]
    _traces[:] = [(place, name) for place, name in _TRACES if not hasattr(place, name)]
    config = Config()
    config.HistoryManager.enabled = False  # no database, no thread
    try:
        _own = InteractiveShell.instance(config=config, ipython_dir=_folder)
    finally:
        sys.modules["__main__"] = main  # IPython puts its namespace there
    # `close_own_shell` does what IPython would do at the end of the process
    atexit.unregister(_own.atexit_operations)
    _own.user_ns.update(_names)
    disarm_exit(_own)
    return _own


def disarm_exit(shell: Any) -> None:
    """Make `exit` and `quit` in a cell say what to do instead of ending the process."""

    def ask_exit() -> None:
        print(
            "exit and quit do not end an engine. `%gpupool stop` ends the pool; `return` from a "
            "function or raise an exception to leave a cell early.",
            file=sys.stderr,
        )

    shell.ask_exit = ask_exit
    _silence_advice()


def keep_no_outputs(shell: Any) -> None:
    """Let `shell` not store what cells print and display, as it does for a saved history.

    Nothing on an engine reads that, and a cell that prints 100 MB would keep several times as much.
    """
    shell._tee = lambda channel: contextlib.nullcontext()
    kept = getattr(shell.history_manager, "outputs", {})  # older versions of IPython have none
    shell.events.register("post_run_cell", lambda _: kept.clear())


def _silence_advice() -> None:
    """No word from IPython on SystemExit: its advice is not that for an engine."""
    warnings.filterwarnings("ignore", message="To exit: use 'exit'")


def close_own_shell() -> None:
    """End the shell that `this_shell` has made, if it has."""
    global _own
    if _own is None:
        return
    shell, _own = _own, None
    InteractiveShell.clear_instance()
    shell.atexit_operations()
    for place, name in _traces:
        if hasattr(place, name):
            delattr(place, name)
