"""Which ranks of a pool train, on what, and the share of a batch that each has. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise

from gpupool.core.errors import OptionsError
from gpupool.core.machine.topology import Rank


@dataclass(frozen=True, slots=True)
class Execution:
    """The `ranks` that train, in order; `on_gpu` says whether each does so on its GPU.

    `idle` maps each of the other ranks to the reason.
    """

    ranks: tuple[int, ...]
    on_gpu: bool
    idle: Mapping[int, str] = field(default_factory=dict)


def choose_execution(
    execution: str, ranks: Sequence[Rank], training_ranks: Sequence[int], why_cpu: str = ""
) -> Execution:
    """What `TrainingOptions.execution` means for the ranks of a pool.

    "auto" and "parallel-auto" are the ranks that have a GPU, or all ranks on CPU where none has;
    "cpu" and "gpu" one rank; "multi-gpu" the GPUs of one machine; "parallel-gpu" all GPUs;
    "parallel-cpu" all ranks on CPU, GPUs or not.

    Args:
        training_ranks: those that the pool lets train: see `topology.training_ranks`.
        why_cpu: why the pool has no GPU, for the error.

    Raises:
        OptionsError: the pool has no GPU, or GPUs of several machines where one is meant.
    """
    # In the order of the ranks, so that "gpu" means the first one that has a GPU.
    with_gpu = {rank.rank: rank.node_rank for rank in ranks if rank.gpu is not None}
    everyone = [rank.rank for rank in ranks]
    one = f"execution={execution!r} trains on one rank"
    if execution == "cpu":
        return _chosen(everyone, everyone[:1], False, one)
    if execution == "parallel-cpu":
        return _chosen(everyone, everyone, False, "")
    if execution in ("auto", "parallel-auto"):
        return _chosen(everyone, training_ranks, bool(with_gpu), "has no GPU of its own")
    if not with_gpu:
        reason = f" ({why_cpu})" if why_cpu else ""
        raise OptionsError.of(
            "execution",
            execution,
            f"none of the pool's {len(everyone)} ranks has a GPU{reason}; choose 'auto' "
            "or 'parallel-cpu', or start a pool where there are GPUs.",
            "no GPU",
        )
    if execution == "gpu":
        return _chosen(everyone, list(with_gpu)[:1], True, one)
    num_hosts = len({*with_gpu.values()})
    if execution == "multi-gpu" and num_hosts > 1:
        raise OptionsError(
            f"execution='multi-gpu' means the GPUs of one machine, and the pool has some on "
            f"{num_hosts}: choose 'parallel-gpu' for all of them.",
            "several hosts",
            "execution",
        )
    return _chosen(everyone, list(with_gpu), True, "has no GPU of its own")


def _chosen(everyone: Sequence[int], chosen: Sequence[int], on_gpu: bool, why: str) -> Execution:
    idle = {rank: why for rank in everyone if rank not in chosen}
    return Execution(tuple(chosen), on_gpu, idle)


def device_names(ranks: Sequence[Rank], execution: Execution) -> tuple[str, ...]:
    """What each rank that trains computes on: "cuda:0 NVIDIA H200", numbered as on its machine, or
    "CPU"."""
    by_number = {rank.rank: rank for rank in ranks}
    gpus = [by_number[number].gpu if execution.on_gpu else None for number in execution.ranks]
    return tuple(f"cuda:{gpu.label} {gpu.name}" if gpu else "CPU" for gpu in gpus)


@lru_cache(maxsize=1024)
def bounds(size: int, load: tuple[float, ...]) -> tuple[int, ...]:
    """Where each rank's share of `size` samples begins, and after the last rank `size`.

    Each boundary is where the loads before it say, rounded down; computed in fractions, so that
    ranks of equal load, written in whatever unit, get what they would get without loads.

    >>> bounds(10, (2, 1, 0, 1))
    (0, 5, 7, 7, 10)
    """
    # Floats become fractions without rounding: 0.1 three times cuts as 1 three times.
    exact = [Fraction(share) for share in load]
    if not exact or min(exact) < 0 or not sum(exact):
        raise OptionsError.of("rank_load", load, "must not be negative, and one must be above 0.")
    total = sum(exact)
    return (0, *(int(size * so_far / total) for so_far in accumulate(exact)))


def share_sizes(size: int, load: Sequence[float], num_parts: int = 1) -> list[int]:
    """How many of `size` samples each rank has; with equal loads they differ by at most 1.

    `num_parts`: into how many parts they are cut before, of each of which each rank has a share.
    """
    # With batch norm over all ranks the whole batch is cut before the ranks divide each part.
    cuts = [size * part // num_parts for part in range(num_parts + 1)]
    edges = [bounds(end - begin, tuple(load)) for begin, end in pairwise(cuts)]
    of_parts = [[end - begin for begin, end in pairwise(part)] for part in edges]
    return [sum(of_rank) for of_rank in zip(*of_parts, strict=True)]
