"""The GPUs of this machine: asked of the driver, never of torch, and as a table. Runs anywhere."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from gpupool.core.machine.gpu_setup import why_torch_cannot
from gpupool.core.machine.nvml import read_gpus
from gpupool.core.machine.topology import Discovery, Gpu, survey
from gpupool.core.machine.uses import Use, holder_text


class GpuTable(tuple[Gpu, ...]):
    """GPUs that show as a table. `repr` is its text form; a notebook draws it.

    `selected` maps the UUID of a GPU to who uses it, such as "rank 0", `uses` to who else does.
    `none` is the sentence that stands for a table without rows.
    """

    HEADER = (
        *("index", "name", "capability", "memory", "utilization", "temperature"),
        *("available", "selected", "held by", "uuid"),
    )
    selected: Mapping[str, str]
    none: str
    uses: Mapping[str, Use]

    def __new__(
        cls,
        gpus: Iterable[Gpu] = (),
        selected: Mapping[str, str] | None = None,
        none: str = "No GPU.",
        uses: Mapping[str, Use] | None = None,
    ) -> GpuTable:
        table = super().__new__(cls, gpus)
        table.selected, table.none, table.uses = selected or {}, none, uses or {}
        return table

    @staticmethod
    def share(gpu: Gpu, column: str) -> float | None:
        """How full a column is, 0..1, where it shows a share and the driver knows it."""
        if column == "utilization" and gpu.utilization_percent is not None:
            return gpu.utilization_percent / 100
        if column == "memory" and gpu.used_memory_bytes is not None and gpu.total_memory_bytes:
            return gpu.used_memory_bytes / gpu.total_memory_bytes
        return None

    def rows(self) -> list[tuple[str, ...]]:
        """One tuple of texts for each GPU, in the order of `HEADER`; "-" where unknown."""
        return [
            (
                gpu.label,
                gpu.name,
                gpu.compute_capability or "-",
                _memory(gpu),
                _known(gpu.utilization_percent, " %"),
                _known(gpu.temperature_c, " °C"),
                self._available(gpu),
                self.selected.get(gpu.uuid, "-"),
                ", ".join(map(holder_text, gpu.processes)) or "-",
                gpu.uuid,
            )
            for gpu in self
        ]

    def _available(self, gpu: Gpu) -> str:
        """Whether a pool of this notebook can use it, or may only if it is asked to share."""
        if gpu.unavailable:
            return f"no: {gpu.unavailable}"
        use = self.uses.get(gpu.uuid)
        if use is None:
            return "yes"
        return f"no: {use.words}" if use.is_taken else f"yes: {use.words}"

    def __repr__(self) -> str:
        if not self:
            return self.none
        lines = [self.HEADER, *self.rows()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


def _memory(gpu: Gpu) -> str:
    if gpu.used_memory_bytes is None and gpu.total_memory_bytes is None:
        return "-"
    return f"{_gib(gpu.used_memory_bytes)} of {_gib(gpu.total_memory_bytes)} GiB"


def _gib(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**30:.1f}"


def _known(value: int | None, unit: str) -> str:
    return "-" if value is None else f"{value}{unit}"


def discover() -> Discovery:
    """Ask the driver which GPUs there are; respects `CUDA_VISIBLE_DEVICES`."""
    gpus, trouble = read_gpus()
    if gpus:
        trouble = why_torch_cannot()
    return survey(gpus, trouble, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus() -> list[Gpu]:
    """The GPUs and MIG instances this process may use; empty without an NVIDIA driver."""
    return list(discover().usable)
