"""Modules of the user's that the notebook has loaded again, by `importlib.reload` or `%autoreload`.

Runs on the client. Values travel with the names of their modules, so ranks have to follow.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType

from gpupool.core.wire.values import Reloaded

_INSTALLED = re.compile(rf"{re.escape(sysconfig.get_path('stdlib'))}|.*/(site|dist)-packages/")
_lock = threading.Lock()
_seen: set[str] = set()  # names of modules
# name -> the spec by which it was loaded, and the time of its file then
_own: dict[str, tuple[ModuleSpec | None, float]] = {}
_reloaded: dict[str, int] = {}


def reloaded() -> Reloaded | None:
    """The modules of the user's that were seen to have been loaded again; None without any."""
    with _lock:
        times = _times_of_autoreload()
        for name in sys.modules.keys() - _seen:
            _seen.add(name)
            if time := _time_of_own(name):
                _own[name] = _spec(name), times.get(name, time)
        for name, (spec, time) in _own.items():
            if name in sys.modules:  # what was only removed is not loaded again
                now = _spec(name), times.get(name, time)
                if now[0] is not spec or now[1] != time:  # specs of one file are equal
                    _own[name] = now
                    _reloaded[name] = _reloaded.get(name, 0) + 1
        if not _reloaded:
            return None
        return Reloaded(dict(_reloaded), [path for path in sys.path if path])


def _spec(name: str) -> ModuleSpec | None:
    return getattr(sys.modules.get(name), "__spec__", None)


def _time_of_own(name: str) -> float | None:
    """When the file of a module was written; None if it belongs to an installed package."""
    module = sys.modules.get(name)
    # Not by `getattr`: what some packages put here imports itself then.
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    if not isinstance(file, str) or not file.endswith(".py") or name.startswith("__"):
        return None
    if _INSTALLED.match(file) or name.partition(".")[0] == "gpupool":
        return None
    return os.path.getmtime(file) if os.path.exists(file) else None


def _times_of_autoreload() -> Mapping[str, float]:
    """Module -> the time of its file when `%autoreload` loaded it: it may leave the spec alone."""
    with contextlib.suppress(KeyError, AttributeError):
        magics = sys.modules["IPython"].get_ipython().magics_manager.registry["AutoreloadMagics"]
        times: Mapping[str, float] = magics._reloader.modules_mtimes
        return times
    return {}
