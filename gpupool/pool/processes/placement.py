"""Which rank of a new pool gets what. Runs on the client.

The arithmetic is in `gpupool/core/machine/topology.py`; here it is asked in the right
order: look, choose, lock, place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpupool.core.errors import OptionsError, PlacementError
from gpupool.core.machine.cores import num_usable_cores
from gpupool.core.machine.gpus import discover
from gpupool.core.machine.topology import Discovery, Gpu, Rank, choose, place, training_ranks
from gpupool.core.options.pool_options import PoolOptions

Lock = Callable[[Sequence[str], int], list[str]]
"""(uuids, number) -> the `number` of these GPUs, in order, that are now locked for this pool.

Raises PlacementError, naming the owner, if fewer are free.
"""


@dataclass(frozen=True, slots=True)
class Placement:
    """The ranks of a pool and how they talk.

    `backend` is that of the group of all ranks; `training_backend` that of the ranks that train.
    `why_cpu` says why GPUs were wanted, if there are any, and none is used; else "".
    """

    ranks: tuple[Rank, ...]
    training_ranks: tuple[int, ...]
    backend: str
    training_backend: str
    why_cpu: str = ""


def place_ranks(
    options: PoolOptions,
    lock: Lock,
    *,
    found: Discovery | None = None,
    num_cores: int | None = None,
) -> Placement:
    """Place the ranks that `options` ask for and lock their GPUs.

    Without `gpus=` every usable GPU is a candidate, so that `n` ranks find `n` free ones. The GPUs
    of `gpus=` are needed as they are; a smaller `n` takes the first of them.

    Args:
        lock: called once, if a GPU is to be used, as the last thing that can fail.
        found: the GPUs of this machine; None asks the driver.
        num_cores: cores to divide among the ranks; None asks the system.

    Raises:
        PlacementError: a GPU that was asked for is not there, cannot be used, or is locked.
        OptionsError: `backend="nccl"` and not every rank gets a GPU.
    """
    why_cpu = ""
    gpus: list[Gpu] = []
    if options.device != "cpu":
        found = discover() if found is None else found
        gpus = choose(found, options.gpus or None)
        why_cpu = found.why_none
    if not gpus and options.device == "gpu":
        raise PlacementError(
            f"device='gpu': {why_cpu}. `%gpupool start --cpu` starts CPU ranks.", "no GPU", "device"
        )
    size = options.n or len(gpus)
    if options.backend == "nccl" and (not gpus or size > len(gpus)):
        have = f"{len(gpus)} can be used" if gpus else why_cpu
        raise OptionsError(
            f"backend='nccl' needs a GPU for every rank; {have}. Use 'gloo' or 'auto'.",
            "no GPU",
            "backend",
        )
    if gpus:
        gpus = _locked(gpus[:size] if options.gpus else gpus, min(size, len(gpus)), lock)
    ranks = place(gpus, options.n, num_usable_cores() if num_cores is None else num_cores)
    return _with_backends(options.backend, ranks, why_cpu)


def _locked(candidates: Sequence[Gpu], number: int, lock: Lock) -> list[Gpu]:
    by_uuid = {gpu.uuid: gpu for gpu in candidates}
    return [by_uuid[uuid] for uuid in lock(list(by_uuid), number)]


def _with_backends(wanted: str, ranks: tuple[Rank, ...], why_cpu: str) -> Placement:
    """NCCL among ranks that have a GPU each, gloo as soon as one without is in the group."""
    training = training_ranks(ranks)
    have_gpus = any(rank.gpu for rank in ranks)
    among_training = wanted if wanted != "auto" else "nccl" if have_gpus else "gloo"
    among_all = among_training if len(training) == len(ranks) else "gloo"
    return Placement(ranks, training, among_all, among_training, why_cpu)
