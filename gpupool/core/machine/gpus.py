"""The GPUs of this machine: which there are, and who uses them, as a table. Runs anywhere.

Asked of the driver, never of torch. Pools lock the GPUs that they use (`locks.py`). Other programs
do not; the driver shows who holds memory. It does not show the processes of another container, and
not what is only about to begin.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from gpupool.core.formatting import text_table
from gpupool.core.machine.nvml import read_gpus
from gpupool.core.machine.topology import Discovery, Gpu, survey

_NO_CUDA = re.compile(r"^cuda\b[^=]*= *None", re.MULTILINE)
_UNSEEN_BYTES = 2 * 2**30  # the driver itself has up to 1 GiB, which it counts as used


def discover() -> Discovery:
    """Ask the driver which GPUs there are; respects `CUDA_VISIBLE_DEVICES`."""
    gpus, trouble = read_gpus()
    if why_none := trouble or why_torch_cannot():
        return Discovery((), why_none)
    return survey(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


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


def other_users(gpu: Gpu) -> list[str]:
    """The other users who compute on a GPU, which is theirs then."""
    return sorted({process.user for process in gpu.processes} - {psutil.Process().username(), "?"})


def use_of(gpu: Gpu, is_ours: bool = False) -> str:
    """Who computes on a GPU beside us, in words; "" if nobody does.

    Args:
        is_ours: ranks of this notebook compute there: by this user, perhaps unseen.
    """
    if others := other_users(gpu):
        return f"in use by {', '.join(others)}"
    if is_ours:
        return ""
    known = [process.used_memory_bytes for process in gpu.processes]
    unseen = (gpu.used_memory_bytes or 0) - sum(filter(None, known))
    users = {process.user for process in gpu.processes}
    if "?" in users or (unseen > _UNSEEN_BYTES and None not in known):
        return "in use by a process that cannot be seen from here"
    return "in use by you" if users else ""


@dataclass(frozen=True, repr=False)
class GpuTable:
    """GPUs that show as a table. `repr` is its text form; a notebook draws it.

    `selected` maps the UUID of a GPU to the rank of this notebook that has it, such as "rank 0".
    `none` is the sentence that stands for a table without rows.
    """

    gpus: Sequence[Gpu] = ()
    selected: Mapping[str, str] = field(default_factory=dict)
    none: str = "No GPU."

    def __iter__(self) -> Iterator[Gpu]:
        return iter(self.gpus)

    def __len__(self) -> int:
        return len(self.gpus)

    def __getitem__(self, row: int) -> Gpu:
        return self.gpus[row]

    def rows(self) -> list[dict[str, str]]:
        """The texts of each GPU by the names of their columns; "-" where unknown."""
        return [
            {
                "index": gpu.label,
                "name": gpu.name,
                "capability": gpu.compute_capability or "-",
                "memory": f"{_gib(gpu.used_memory_bytes)} of {_gib(gpu.total_memory_bytes)} GiB",
                "utilization": _known(gpu.utilization_percent, " %"),
                "temperature": _known(gpu.temperature_c, " °C"),
                "available": gpu.unavailable or use_of(gpu, gpu.uuid in self.selected) or "yes",
                "selected": self.selected.get(gpu.uuid, "-"),
                "held by": ", ".join(map(str, gpu.processes)) or "-",
                "uuid": gpu.uuid,
            }
            for gpu in self
        ]

    def __repr__(self) -> str:
        if not self:
            return self.none
        rows = self.rows()
        return text_table([tuple(rows[0]), *(tuple(row.values()) for row in rows)])


def _gib(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**30:.1f}"


def _known(value: int | None, unit: str) -> str:
    return "-" if value is None else f"{value}{unit}"
