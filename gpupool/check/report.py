"""The report of a check: the machine it ran on, its lines, and what they come to."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections import Counter
from dataclasses import dataclass

import gpupool
from gpupool.check.promise import Line
from gpupool.core.machine.nvml import driver_version

MAX_STATUS = 125  # shells use those above for what they have to say themselves


@dataclass(frozen=True, slots=True)
class Machine:
    """What a promise may depend on; "" where something is not there. Nothing in it names a person
    or a computer, so that it can be shown to others."""

    gpupool: str
    python: str
    system: str
    torch: str
    cuda: str
    nccl: str
    driver: str
    gpus: tuple[str, ...]

    def __str__(self) -> str:
        kinds = Counter(self.gpus)
        facts = {
            "gpupool": self.gpupool,
            "Python": self.python,
            "torch": self.torch,
            "CUDA": self.cuda,
            "NCCL": self.nccl,
            "driver": self.driver,
        }
        words = [f"{name} {version}" for name, version in facts.items() if version]
        words += [f"{number} x {name}" for name, number in kinds.items()] or ["no GPU"]
        return ", ".join([*words, self.system])


def this_machine() -> Machine:
    """The versions and GPUs of this machine; opens no context on a GPU."""
    import torch

    return Machine(
        gpupool=gpupool.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        torch=str(torch.__version__),
        cuda=str(torch.version.cuda or ""),
        nccl=_nccl(),
        driver=driver_version(),
        gpus=tuple(gpu.name for gpu in gpupool.gpus()),
    )


def _nccl() -> str:
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return ""
    # What is linked to torch says its own version: no GPU is asked.
    return ".".join(map(str, torch.get_device_module("cuda").nccl.version()))


@dataclass
class Report:
    """A check that is over, or was interrupted."""

    machine: Machine
    device: str
    lines: list[Line]
    seconds: float = 0.0
    interrupted: bool = False

    def number_of(self, verdict: str) -> int:
        """How many lines say this."""
        return sum(line.verdict == verdict for line in self.lines)

    @property
    def status(self) -> int:
        """The exit status: the number of promises that are not kept."""
        return min(self.number_of("FAIL"), MAX_STATUS)

    def summary(self) -> str:
        """What it comes to, in one line."""
        failed, skipped, notes = map(self.number_of, ("FAIL", "skip", "note"))
        words = [f"{failed} of {len(self.lines)} promises not kept"]
        words += [f"{skipped} skipped"] * bool(skipped) + [f"{notes} to look at"] * bool(notes)
        end = ". It was interrupted." if self.interrupted else ""
        return f"{', '.join(words)}; {self.seconds:.0f} s on the {self.device}{end}"

    def to_json(self) -> str:
        """All of it, for programs."""
        return json.dumps(
            {
                **dataclasses.asdict(self),
                "failed": self.number_of("FAIL"),
                "lines": [dataclasses.asdict(line) for line in self.lines],
            },
            indent=1,
        )
