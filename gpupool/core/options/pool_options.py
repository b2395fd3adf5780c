"""How a pool is started, as one frozen dataclass, and what lines of magics say. Runs anywhere."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from gpupool.core.errors import OptionsError
from gpupool.core.options.checks import number, parse_duration_s
from gpupool.core.options.fields import Options, explain, option

PROFILES = ("local", "ssh", "slurm", "mpi", "kubernetes", "sky")


def _limit_s(name: str, value: Any) -> float:
    return math.inf if value == math.inf else number(above=0)(name, value)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PoolOptions(Options):
    """How a pool is started."""

    # ---- where the ranks run
    profile: str = "local"
    """Where the engines run; "local" is this machine. Else "ssh", "slurm", "mpi", "kubernetes",
    "sky", or the name of a table in gpupool.toml: see docs/guides/clusters.md."""
    n: int | None = option(None, number(whole=True, least=1))
    """Number of ranks; None: one per GPU, or 2 on a machine without.

    Ranks beyond the GPUs are there, without a GPU, and take no part in training."""
    hosts: tuple[str, ...] = ()
    """HOST or HOST:RANKS, where the cluster does not say them itself; of "kubernetes" and "sky",
    how many."""
    words: tuple[str, ...] = ()
    """What goes to the scheduler as it is, such as ("-p", "gpu")."""
    gpus: tuple[str, ...] | None = None
    """GPUs of this machine to use: indices as of `nvidia-smi`, UUIDs, or MIG instances such as
    "0:1"; None: all visible ones."""
    device: Literal["auto", "cpu", "gpu"] = option("auto")
    """"auto" takes GPUs if there are any, "gpu" insists on them, "cpu" leaves them alone."""
    backend: Literal["auto", "nccl", "gloo"] = option("auto")
    """"auto": "nccl" among ranks that have a GPU each, "gloo" as soon as one without takes part.

    Ranks with MIG instances of one GPU are joined by gloo."""
    force: bool = False
    """Take GPUs that another pool has locked, or another user computes on, too."""

    # ---- what they have, and how long
    env: tuple[str, ...] = ()
    """Names or globs of environment variables that every rank gets."""
    idle_timeout: str | float | None = "30m"
    """Stop the pool after this time without use: "90s", "30m", "2h", "never", or seconds."""
    timeout_s: float = option(60.0, number(above=0))
    """Give up starting after this many seconds; those in which a scheduler has no hosts yet do not
    count."""
    on_hang: Literal["tell", "abort"] = option("tell")
    """What happens when the ranks wait for each other and none gets on: "tell" says where each one
    is, below the running cell; "abort" ends the cell as well, with that as its error. Where a rank
    may still come to the others, because it sleeps or computes, that is said and nothing ends."""
    hang_after_s: float = option(30.0, _limit_s)
    """Seconds without progress after which ranks in a collective count as hanging; inf: never."""

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        parse_duration_s(self.idle_timeout)  # raises
        idle = ("hosts", "words") if self.profile == "local" else ("gpus",)
        beside = dict.fromkeys(idle, f"profile={self.profile!r}")
        if self.device == "cpu":
            names = ("gpus", "force") + ("backend",) * (self.backend == "nccl")
            beside |= dict.fromkeys(names, "device='cpu'")
        for name, other in beside.items():
            if value := getattr(self, name):
                raise OptionsError(f"{name}={value!r} and {other} exclude each other.")

    @property
    def idle_timeout_s(self) -> float | None:  # None for never
        return parse_duration_s(self.idle_timeout)


explain(PoolOptions)


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Ranks of "all", "0", "0,2", "0:4", "::2" or "-1" of `world_size` ranks, sorted, each once.

    >>> parse_ranks("0:2,-1", 4), parse_ranks("1::2", 4)
    ((0, 1, 3), (1, 3))
    """
    ranks: set[int] = set()
    for part in text.split(","):
        try:
            ranks.update(_parse_part(part.strip(), range(world_size)))
        except (ValueError, IndexError):
            raise OptionsError(
                f"ranks {text!r}: write all, 0, 0,2, 0:4, ::2 or -1; this pool has "
                f"ranks 0 to {world_size - 1}."
            ) from None
    return tuple(sorted(ranks))


def _parse_part(part: str, every: range) -> Iterable[int]:
    if part == "all":
        return every
    if ":" not in part:
        return [every[int(part)]]  # a range takes negative indices, so -1 is the last rank
    chosen = every[slice(*(int(p) if p else None for p in part.split(":", 2)))]
    # Python gives an empty range for a slice beyond the ranks; here it is a mistake.
    if not chosen:
        raise IndexError(part)
    return chosen
