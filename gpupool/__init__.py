"""gpupool: a parallel pool for Jupyter, one engine per GPU.

    %load_ext gpupool
    %gpupool start

Importing this package is quick and loads neither torch nor ipywidgets: names are looked up when
used.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from gpupool.core import progress as _progress

__version__ = "0.1.0"

# The stub has the one list of public names, each with its module: for type checkers, and for this.
# No library reads it, as the host's processes stand on the standard library alone.
_STUB = Path(__file__).with_suffix(".pyi").read_text()
_MODULES = {name: module for module, name in re.findall(r"(?m)^from (\S+) import (\w+)", _STUB)}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'gpupool' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    return __all__


def _open_drawing(course: _progress.Course) -> _progress.Drawing | None:
    """What shows a course to the user; imported when something has lasted for a second."""
    from gpupool.notebook.page.progress_view import open_drawing

    return open_drawing(course)


_progress.draw_with(_open_drawing)
