"""Which rank of a new pool gets what. Runs on the client.

The arithmetic is in `gpupool/core/machine/topology.py`; here it is asked in the right
order: look, choose, lock, place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpupool.core.errors import OptionsError, PlacementError
from gpupool.core.machine.gpus import discover, other_users
from gpupool.core.machine.limits import little_shared_memory, num_usable_cores
from gpupool.core.machine.topology import Discovery, Gpu, Rank, choose, place
from gpupool.core.options.pool_options import PoolOptions


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
    lock: Callable[[Sequence[str], int], list[str]],
    *,
    found: Discovery | None = None,
    num_cores: int | None = None,
) -> Placement:
    """Place the ranks that `options` ask for and lock their GPUs.

    Without `gpus=` every usable GPU is a candidate, so that `n` ranks find `n` free ones. The GPUs
    of `gpus=` are needed as they are; a smaller `n` takes the first of them. One on which another
    user computes is not free, whether a pool does or not; `force` shares it.

    Args:
        lock: called once, if a GPU is to be used, as the last thing that can fail: (UUIDs, number)
            -> the `number` of these GPUs, in order, that are now locked for this pool.
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
    num_cards = len({gpu.card for gpu in gpus})  # NCCL joins no instances of one GPU
    if options.backend == "nccl" and (not gpus or size > num_cards):
        have = f"{num_cards} can be used" if gpus else why_cpu
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
    cores = num_usable_cores() if num_cores is None else num_cores
    return _with_backends(options.backend, place(gpus, options.n, cores), why_cpu)


def too_few(why: str, free: int, num_gpus: int, number: int) -> PlacementError:
    """That `free` of `num_gpus` GPUs can be had and not `number`, for which reason, what to do."""
    take = f"`-n {free}` takes those" if free else "`--cpu` starts CPU ranks"
    return PlacementError(
        f"You asked for {number} of {num_gpus} GPUs, and {free} can be had; {why}. {take}; "
        "--force (force=True) shares the GPUs."
    )


def _free(candidates: Sequence[Gpu], number: int) -> list[Gpu]:
    """The candidates on which no other user computes, those that nobody uses first."""
    taken = [gpu for gpu in candidates if other_users(gpu)]
    free = [gpu for gpu in candidates if gpu not in taken]
    if len(free) < number:
        holders = [(gpu.label, ", ".join(map(str, gpu.processes))) for gpu in taken]
        whose = "; ".join(f"GPU {label} is in use by {who}" for label, who in holders)
        raise too_few(whose, len(free), len(candidates), number)
    return sorted(free, key=lambda gpu: bool(gpu.processes))


def _with_backends(wanted: str, ranks: tuple[Rank, ...], why_cpu: str) -> Placement:
    """NCCL among ranks that have a GPU each, gloo as soon as one without is in the group."""
    gpus = [rank.gpu for rank in ranks if rank.gpu]
    training = tuple(rank.rank for rank in ranks if rank.gpu or not gpus)
    notes = [little_shared_memory()] if len(gpus) > 1 else []
    among_training = wanted if wanted != "auto" else "nccl" if gpus else "gloo"
    if among_training == "nccl" and len({gpu.card for gpu in gpus}) < len(gpus):
        among_training = "gloo"
        notes.append(
            "Several ranks have instances of one GPU, which NCCL does not join: they communicate "
            "by gloo, which is slower."
        )
    among_all = among_training if len(training) == len(ranks) else "gloo"
    return Placement(
        ranks, training, among_all, among_training, why_cpu, tuple(filter(None, notes))
    )
