"""Who else uses a GPU, as far as the driver shows it. Runs anywhere.

Pools lock the GPUs that they use (`locks.py`). Other programs do not; the driver shows who holds
memory. It does not show the processes of another container, and not what is only about to begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpupool.core.machine.locks import lock_owners
from gpupool.core.machine.processes import this_user
from gpupool.core.machine.topology import Gpu, GpuProcess

_UNSEEN_BYTES = 2 * 2**30  # the driver itself has up to 1 GiB, which it counts as used
_MPS = "nvidia-cuda-mps"  # the server through which others compute; it holds little memory


@dataclass(frozen=True, slots=True)
class Use:
    """What another process makes of a GPU; `is_taken`: a pool has it only with `force`."""

    words: str
    is_taken: bool


def use_of(gpu: Gpu, user: str) -> Use | None:
    """Who computes on a GPU already; None if nobody does.

    A GPU that draws a screen is not in use for that.

    Args:
        user: the name of this user, who may share a GPU with programs of their own.
    """
    users = {process.user for process in computing(gpu.processes)}
    known = [process.used_memory_bytes for process in gpu.processes]
    unseen = (gpu.used_memory_bytes or 0) - sum(filter(None, known))
    if others := sorted(users - {user, "?"}):
        return Use(f"in use by {', '.join(others)}", is_taken=True)
    if "?" in users or (unseen > _UNSEEN_BYTES and None not in known):
        return Use("in use by a process that cannot be seen from here", is_taken=False)
    return Use("in use by you", is_taken=False) if users else None


def uses(gpus: Sequence[Gpu], ours: Sequence[str]) -> dict[str, Use]:
    """UUID -> who else uses that GPU; those that nobody else does are left out.

    Args:
        ours: the UUIDs of which ranks of this notebook compute: by this user, perhaps unseen.
    """
    user, owners = this_user(), lock_owners([gpu.uuid for gpu in gpus])
    found: dict[str, Use] = {}
    for gpu in gpus:
        use = use_of(gpu, user)
        if gpu.uuid in ours:
            use = use if use and use.is_taken else None
        elif gpu.uuid in owners and not (use and use.is_taken):
            use = Use("in use by another pool", is_taken=True)
        if use:
            found[gpu.uuid] = use
    return found


def computing(processes: Sequence[GpuProcess]) -> list[GpuProcess]:
    """Those that have a CUDA context, in which they can compute."""
    return [p for p in processes if p.computes and not p.name.startswith(_MPS)]


def holder_text(process: GpuProcess) -> str:
    """A process that holds memory, as in "python 4711 (ada, 5.0 GiB)"."""
    used = process.used_memory_bytes
    shown = "-" if used is None else f"{used / 2**30:.1f}"
    return f"{process.name} {process.pid} ({process.user}, {shown} GiB)"


def taken_by_others(gpus: Sequence[Gpu]) -> list[Gpu]:
    """Those on which another user computes, who knows nothing of locks."""
    user = this_user()
    return [gpu for gpu in gpus if (use := use_of(gpu, user)) and use.is_taken]
