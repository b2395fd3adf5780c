"""Loads the user's modules again that the notebook has loaded again. Runs on engines."""

from __future__ import annotations

import importlib
import sys
import weakref
from typing import Any

from gpupool.core.wire.values import Reloaded
from gpupool.engine.cells.variables import find_modules
from gpupool.engine.process import this_rank

_heard: dict[str, int] = {}
_old_objects: dict[tuple[str, str], list[weakref.ref[Any]]] = {}


def load_again(reloaded: Reloaded) -> None:
    """Follow the notebook.

    Functions and objects that are here already get the new code, as with `%autoreload`.
    """
    new = [name for name, times in reloaded.times.items() if _heard.get(name) != times]
    _heard.update(reloaded.times)
    waiting: dict[str, Exception | None] = {name: None for name in new if name in sys.modules}
    if not waiting:
        return
    find_modules(reloaded.sys_path)
    from IPython.extensions.autoreload import superreload

    importlib.invalidate_caches()
    num_before = 0
    while len(waiting) != num_before:  # one may need something new of another one
        num_before = len(waiting)
        for name in list(waiting):
            try:
                superreload(sys.modules[name], old_objects=_old_objects)
                del waiting[name]
            except Exception as error:
                waiting[name] = error
    for name, problem in waiting.items():
        print(
            f"gpupool: rank {this_rank().rank} still has the module {name} as it was before, which "
            f"cannot be loaded again there: {type(problem).__name__}: {problem}",
            file=sys.stderr,
        )
