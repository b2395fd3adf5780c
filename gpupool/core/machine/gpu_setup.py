"""How this machine is set up for GPUs, where that decides what a pool can do. Runs anywhere."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

_MIB = 1 << 20
# NCCL needs 10 to 33 MiB a connection where GPUs cannot reach each other; so do data loaders.
_SHARED_BYTES = 1 << 30
_SHARED = Path("/dev/shm")  # noqa: S108 - the one that NCCL uses
_NO_CUDA = re.compile(r"^cuda\b[^=]*= *None", re.MULTILINE)


def why_torch_cannot() -> str:
    """Why torch, as it is installed, cannot use this machine's GPUs; "" if it may.

    It is read from a file: to import torch takes the notebook seconds.
    """
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        file = Path(folder) / "version.py"
        if file.is_file() and _NO_CUDA.search(file.read_text()):
            return "torch is built without CUDA: install one that is built with it"
    return ""


def little_shared_memory(folder: Path = _SHARED) -> str:
    """What to say if shared memory is small, as it is in a container by default; else ""."""
    if not folder.is_dir():
        return ""
    found = os.statvfs(folder)
    size = found.f_blocks * found.f_frsize
    if size >= _SHARED_BYTES:
        return ""
    return (
        f"Shared memory (/dev/shm) has {size // _MIB} MiB, which NCCL and data loaders can fill: "
        "give the container more (`docker run --shm-size=8g`, or --ipc=host)."
    )
