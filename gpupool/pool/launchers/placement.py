"""Which rank of a new pool gets what. Runs on the client.

The arithmetic is in `gpupool/core/machine/topology.py`; here it is asked in the right
order: look, choose, lock, place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpupool.core.errors import OptionsError, PlacementError
from gpupool.core.machine.gpu_setup import little_shared_memory
from gpupool.core.machine.gpus import discover
from gpupool.core.machine.limits import num_usable_cores, usable_cpus
from gpupool.core.machine.locks import too_few_text
from gpupool.core.machine.topology import Discovery, Gpu, Rank, choose, place, training_ranks
from gpupool.core.machine.uses import computing, holder_text, taken_by_others
from gpupool.core.options.pool_options import PoolOptions

Lock = Callable[[Sequence[str], int], list[str]]
"""(uuids, number) -> the `number` of these GPUs, in order, that are now locked for this pool.

Raises PlacementError, naming the owner, if fewer are free.
"""


# More would take a minute to fail for want of processes; a rank of CPU work needs a core.
_MOST_RANKS, _RANKS_OF_A_CORE = 64, 8


@dataclass(frozen=True, slots=True)
class Placement:
    """The ranks of a pool and how they talk.

    `backend` is that of the group of all ranks; `training_backend` that of the ranks that train.
    `why_cpu` says why GPUs were wanted, if there are any, and none is used; else "". `notes` are
    sentences on what may go wrong here, or was chosen for a reason that the user may not know.
    """

    ranks: tuple[Rank, ...]
    training_ranks: tuple[int, ...]
    backend: str
    training_backend: str
    why_cpu: str = ""
    notes: tuple[str, ...] = ()


def place_ranks(
    options: PoolOptions,
    lock: Lock,
    *,
    found: Discovery | None = None,
    num_cores: int | None = None,
) -> Placement:
    """Place the ranks that `options` ask for and lock their GPUs.

    Without `gpus=` every usable GPU is a candidate, so that `n` ranks find `n` free ones. The GPUs
    of `gpus=` are needed as they are; a smaller `n` takes the first of them. One on which another
    user computes is not free, whether a pool does or not; `force` shares it.

    Args:
        lock: called once, if a GPU is to be used, as the last thing that can fail.
        found: the GPUs of this machine; None asks the driver.
        num_cores: cores to divide among the ranks; None asks the system.

    Raises:
        PlacementError: a GPU that was asked for is not there, cannot be used, is in use, or is
            locked.
        OptionsError: `backend="nccl"` and not every rank gets a GPU that NCCL takes.
    """
    why_cpu = ""
    gpus: list[Gpu] = []
    if options.device != "cpu":
        found = discover() if found is None else found
        gpus = choose(found, options.gpus or None)
        why_cpu = found.why_none
    if not gpus and options.device == "gpu":
        raise PlacementError(f"device='gpu': {why_cpu}. `%gpupool start --cpu` starts CPU ranks.")
    size = options.n or len(gpus)
    cores = num_usable_cores() if num_cores is None else num_cores
    most = max(_MOST_RANKS, cores * _RANKS_OF_A_CORE)
    if size > most:
        raise PlacementError(
            f"n={size}: this machine has {cores} cores, and a pool at most {most:,} ranks here."
        )
    if options.backend == "nccl" and (not gpus or size > len(gpus)):
        have = f"{len(gpus)} can be used" if gpus else why_cpu
        raise OptionsError(
            f"backend='nccl' needs a GPU for every rank; {have}. Use 'gloo' or 'auto'."
        )
    if gpus:
        candidates = gpus[:size] if options.gpus else gpus
        number = min(size, len(gpus))
        if not options.force:
            candidates = _free(candidates, number)
        chosen = lock([gpu.uuid for gpu in candidates], number)
        gpus = [gpu for gpu in gpus if gpu.uuid in chosen]
    ranks = place(gpus, options.n, cores, usable_cpus() if num_cores is None else ())
    return _with_backends(options.backend, ranks, why_cpu)


def _free(candidates: Sequence[Gpu], number: int) -> list[Gpu]:
    """The candidates on which no other user computes, those that nobody uses first."""
    taken = taken_by_others(candidates)
    free = [gpu for gpu in candidates if gpu not in taken]
    if len(free) < number:
        holders = {gpu.label: ", ".join(map(holder_text, gpu.processes)) for gpu in taken}
        whose = "; ".join(f"GPU {label} is in use by {who}" for label, who in holders.items())
        raise PlacementError(too_few_text(whose, len(free), len(candidates), number))
    return sorted(free, key=lambda gpu: bool(computing(gpu.processes)))


def _with_backends(wanted: str, ranks: tuple[Rank, ...], why_cpu: str) -> Placement:
    """NCCL among ranks that have a GPU each, gloo as soon as one without is in the group."""
    training = training_ranks(ranks)
    gpus = [rank.gpu for rank in ranks if rank.gpu]
    found = [little_shared_memory()] if len(gpus) > 1 else []
    among_training = wanted if wanted != "auto" else "nccl" if gpus else "gloo"
    if among_training == "nccl" and _share_a_gpu(gpus):
        if wanted == "nccl":
            raise OptionsError(
                "backend='nccl' does not join several instances of one GPU. Use 'gloo' or 'auto', "
                "or one instance of each GPU."
            )
        among_training = "gloo"
        found.append(
            "Several ranks have instances of one GPU, which NCCL does not join: they communicate "
            "by gloo, which is slower."
        )
    among_all = among_training if len(training) == len(ranks) else "gloo"
    notes = tuple(filter(None, found))
    return Placement(ranks, training, among_all, among_training, why_cpu, notes)


def _share_a_gpu(gpus: Sequence[Gpu]) -> bool:
    """Whether two of these are instances of one GPU."""
    parents = [gpu.parent_uuid for gpu in gpus if gpu.parent_uuid]
    return len(set(parents)) < len(parents)
