"""How this machine is set up for GPUs, where that decides what a pool can do. Runs anywhere.

Versions are read from files: to import torch takes the notebook seconds, and so does CUDA.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path

_MIB = 1 << 20
# NCCL needs 10 to 33 MiB a connection where GPUs cannot reach each other; so do data loaders.
_SHARED_BYTES = 1 << 30
_CUDA = re.compile(r"^cuda\b[^=]*= *(?:'(\d+)[^']*'|None)", re.MULTILINE)
_VERSION = re.compile(r"^__version__\b[^=]*= *'([^']+)'", re.MULTILINE)
# the first NCCL that NCCL_MULTI_RANK_GPU_ENABLE is known to
_NCCL_SHARES = (2, 30)


def why_torch_cannot(driver: tuple[str, int] | None) -> str:
    """Why torch, as it is installed, cannot use this machine's GPUs; "" if it may.

    Args:
        driver: the version of the driver, and the newest CUDA that it serves.
    """
    found = _torch()
    if found is None:
        return ""
    version, needed = found
    if needed is None:
        return f"torch {version} is built without CUDA: install one that is built with it"
    if driver is None or driver[1] >= needed:  # CUDA 12.0's driver serves 12.8 too
        return ""
    return (
        f"the NVIDIA driver {driver[0]} serves CUDA {driver[1]}, and torch {version} needs "
        f"{needed}: update the driver, or install a torch for CUDA {driver[1]}"
    )


def nccl_version() -> tuple[int, ...] | None:
    """The version of the NCCL that was installed with torch; None where that cannot be seen.

    torch from PyPI has it as a package of its own. Other builds have it inside.
    """
    import importlib.metadata  # some 10 ms, which `%load_ext gpupool` can do without

    _, cuda = _torch() or ("", None)
    try:
        version = importlib.metadata.version(f"nvidia-nccl-cu{cuda}")
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(map(int, re.findall(r"\d+", version)))


def nccl_joins_instances(version: tuple[int, ...] | None) -> bool:
    """Whether NCCL takes several ranks of one GPU, as MIG instances of it are, into one group."""
    return version is not None and version >= _NCCL_SHARES


def without_driver(root: Path = Path("/")) -> str:
    """What to add to "no NVIDIA driver"; "" where there is nothing to say.

    Args:
        root: where `proc` is.
    """
    if "microsoft" not in _read(root / "proc/version").lower():
        return ""
    return " (WSL2 has that of Windows: its libraries are in /usr/lib/wsl/lib)"


def notes(num_gpus: int, environ: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """What a pool of this many GPUs should know of this machine: one sentence each.

    Args:
        environ: the environment that the ranks get.
        root: where `dev` is.
    """
    found = []
    if num_gpus and environ.get("CUDA_MPS_PIPE_DIRECTORY"):
        found.append(
            "CUDA_MPS_PIPE_DIRECTORY is set, so the ranks share a server (MPS): one that is "
            "killed while it computes may end the others too."
        )
    if num_gpus > 1 and (words := little_shared_memory(root)):
        found.append(words)
    return found


def little_shared_memory(root: Path = Path("/")) -> str:
    """What to say if shared memory is small, as it is in a container by default; else ""."""
    size = _size(root / "dev/shm")
    if size is None or size >= _SHARED_BYTES:
        return ""
    return (
        f"Shared memory (/dev/shm) has {size // _MIB} MiB, which NCCL and data loaders can fill: "
        "give the container more (`docker run --shm-size=8g`, or --ipc=host)."
    )


@functools.cache
def _torch() -> tuple[str, int | None] | None:
    """torch's version and the CUDA it was built with, None without; None if it is not found."""
    spec = importlib.util.find_spec("torch")
    folders = (spec.submodule_search_locations if spec else None) or ()
    for folder in folders:
        text = _read(Path(folder) / "version.py")
        version, cuda = _VERSION.search(text), _CUDA.search(text)
        if version and cuda:
            return version[1], int(cuda[1]) if cuda[1] else None
    return None


def _size(folder: Path) -> int | None:
    """Bytes of the file system that a folder is; None if it is not there."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
