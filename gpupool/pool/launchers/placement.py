"""Which rank of a new pool gets what, and where: look, choose, lock, place. Runs on the client.

The arithmetic is in `gpupool/core/machine/topology.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

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


@dataclass(frozen=True)
class Site:
    """A host where ranks can be placed: what it has, and how its GPUs are locked.

    `lock` is called once, if a GPU is to be used, as the last thing that can fail: (UUIDs, number)
    -> the `number` of these GPUs, in order, that are now locked for this pool. `num_ranks` is how
    many it is to have, if that is decided; `note` says what may go wrong there.
    """

    lock: Callable[[Sequence[str], int], list[str]]
    found: Discovery
    num_cores: int
    name: str = ""
    interface: str = ""
    address: str = ""
    num_ranks: int | None = None
    note: str = ""


def place_ranks(options: PoolOptions, lock: Callable[[Sequence[str], int], list[str]]) -> Placement:
    """Place the ranks that `options` ask for on this host and lock their GPUs.

    Without `gpus=` every usable GPU is a candidate, so that `n` ranks find `n` free ones. The GPUs
    of `gpus=` are needed as they are; a smaller `n` takes the first of them. One on which another
    user computes is not free, whether a pool does or not; `force` shares it. A PlacementError says
    why a GPU cannot be had, an OptionsError that NCCL lacks one for a rank.
    """
    found = Discovery((), "") if options.device == "cpu" else discover()
    return place_on(options, [Site(lock, found, num_usable_cores(), note=little_shared_memory())])


def place_on(options: PoolOptions, sites: Sequence[Site]) -> Placement:
    """The same on several hosts; `n` is divided among those whose number is not decided."""
    founds = [Discovery((), "") if options.device == "cpu" else site.found for site in sites]
    usable = [choose(found, options.gpus or None) for found in founds]
    why_none = [_at(site, found.why_none) for site, found in zip(sites, founds, strict=True)]
    why_cpu = "" if any(usable) else "; ".join(filter(None, why_none))
    if not any(usable) and options.device == "gpu":
        raise PlacementError(f"device='gpu': {why_cpu}. `%gpupool start --cpu` starts CPU ranks.")
    sizes = _sizes(options, sites, usable)
    # NCCL joins no instances of one GPU
    num_cards = [len({gpu.card for gpu in gpus}) for gpus in usable]
    if options.backend == "nccl" and any(map(operator.gt, sizes, num_cards)):
        have = f"{sum(num_cards)} can be used" if any(usable) else why_cpu
        raise OptionsError(
            f"backend='nccl' needs a GPU for every rank; {have}. Use 'gloo' or 'auto'."
        )
    ranks: list[Rank] = []
    for node, (site, gpus, size) in enumerate(zip(sites, usable, sizes, strict=True)):
        at: dict[str, Any] = {"world_size": sum(sizes), "num_nodes": len(sites), "node_rank": node}
        at |= {"host": site.name, "address": site.address, "interface": site.interface}
        there, first = place(_locked(options, site, gpus, size), size, site.num_cores), len(ranks)
        ranks += [replace(one, rank=first + one.rank, **at) for one in there]
    notes = [
        f"{site.name} has no GPU that can be used ({found.why_none}): its ranks do not train."
        for site, found, gpus in zip(sites, founds, usable, strict=True)
        if any(usable) and not gpus
    ]
    on_gpus = map(min, sizes, map(len, usable))
    notes += [_at(site, site.note) for site, n in zip(sites, on_gpus, strict=True) if n > 1]
    return _with_backends(options.backend, tuple(ranks), why_cpu, notes)


def _sizes(
    options: PoolOptions, sites: Sequence[Site], usable: Sequence[Sequence[Gpu]]
) -> list[int]:
    if options.n and any(site.num_ranks is None for site in sites):
        if options.n < len(sites):
            raise OptionsError(f"n={options.n}: there are {len(sites)} hosts; name fewer.")
        least, more = divmod(options.n, len(sites))  # the first ones have one more
        return [least + (i < more) for i in range(len(sites))]
    return [site.num_ranks or len(gpus) or 2 for site, gpus in zip(sites, usable, strict=True)]


def _locked(options: PoolOptions, site: Site, gpus: list[Gpu], size: int) -> list[Gpu]:
    if not gpus:
        return []
    candidates = gpus[:size] if options.gpus else gpus
    number = min(size, len(gpus))
    try:
        if not options.force:
            candidates = _free(candidates, number)
        chosen = site.lock([gpu.uuid for gpu in candidates], number)
    except PlacementError as error:
        raise PlacementError(_at(site, str(error))) from None
    return [gpu for gpu in gpus if gpu.uuid in chosen]


def _at(site: Site, text: str) -> str:
    return f"{site.name}: {text}" if site.name and text else text


def too_few(why: str, free: int, num_gpus: int, number: int) -> PlacementError:
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


def _with_backends(
    wanted: str, ranks: tuple[Rank, ...], why_cpu: str, notes: list[str]
) -> Placement:
    """NCCL among ranks that have a GPU each, gloo as soon as one without is in the group."""
    gpus = [rank.gpu for rank in ranks if rank.gpu]
    training = tuple(rank.rank for rank in ranks if rank.gpu or not gpus)
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
