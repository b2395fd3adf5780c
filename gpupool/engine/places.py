"""Whose code a file holds: the user's, a library's, or what runs cells. Runs on engines."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path


def _folder(package: str) -> str:
    spec = importlib.util.find_spec(package)
    return f"{Path(spec.origin).parent}/" if spec and spec.origin else "?"


_PACKAGES = ("gpupool", "IPython", "ipykernel", "ipyparallel", "cloudpickle")
MACHINERY = tuple(map(_folder, _PACKAGES))
TORCH = _folder("torch")
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib"))
_NOWHERE = ("<frozen ", "<string>", "<__array_function__")  # code without a file


def is_users(filename: str) -> bool:
    """Whether code of this file is the user's: not a library's, nor ours."""
    return not filename.startswith((*MACHINERY, *LIBRARIES, *_NOWHERE))


def place(filename: str) -> str:
    """A file's name; of what `pool.run` was given without its number, which ranks count apart."""
    return "pool.run" if filename.startswith("<pool.run") else Path(filename).name
