"""Modules of the user's that the notebook has loaded again, by `importlib.reload` or `%autoreload`.

Runs on the client. Values travel with the names of their modules, so ranks have to follow.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from gpupool.core.wire.values import Reloaded

_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD = sysconfig.get_path("stdlib")
_lock = threading.Lock()
_num_seen = 0  # modules that were loaded at the last look
_seen: set[str] = set()
# name -> the spec by which it was loaded, and the time of its file then
_own: dict[str, tuple[ModuleSpec | None, float]] = {}
_reloaded: dict[str, int] = {}


def reloaded() -> Reloaded | None:
    """The modules of the user's that were seen to have been loaded again; None without any."""
    global _num_seen
    with _lock:
        times = _times_of_autoreload()
        if len(sys.modules) != _num_seen:
            _num_seen = len(sys.modules)
            for name in sys.modules.keys() - _seen:
                _seen.add(name)
                if file := _own_file(name):
                    _own[name] = _spec(name), times.get(name) or _time_of(file)
        for name, (spec, time) in list(_own.items()):
            now = _spec(name), times.get(name, time)
            # By identity: specs of one file are equal. What was only removed is not loaded again.
            if name in sys.modules and (now[0] is not spec or now[1] != time):
                _own[name] = now
                _reloaded[name] = _reloaded.get(name, 0) + 1
        if not _reloaded:
            return None
        return Reloaded(dict(_reloaded), [path for path in sys.path if path])


def _own_file(name: str) -> str | None:
    """The file of a module that does not belong to an installed package."""
    module = sys.modules.get(name)
    # Not by `getattr`: what some packages put here imports itself then.
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    if not isinstance(file, str) or not file.endswith(".py") or name.startswith(("__", "gpupool.")):
        return None
    is_installed = file.startswith(_STANDARD) or _INSTALLED & {*Path(file).parts}
    return None if is_installed or name == "gpupool" else file


def _spec(name: str) -> ModuleSpec | None:
    return getattr(sys.modules.get(name), "__spec__", None)


def _time_of(file: str) -> float:
    try:
        return os.stat(file).st_mtime
    except OSError:
        return 0.0


def _times_of_autoreload() -> Mapping[str, float]:
    """Module -> the time of its file when `%autoreload` loaded it: it may leave the spec alone."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    magics = getattr(shell, "magics_manager", None)
    found = getattr(magics, "registry", {}).get("AutoreloadMagics")
    return getattr(getattr(found, "_reloader", None), "modules_mtimes", {})
