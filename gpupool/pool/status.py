"""A pool at one moment, as plain data for views. Runs on the client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpupool.core.machine.topology import Rank

# What the Tab key offers behind `pool.`; the other public names are for the folders above.
FOR_USERS = (
    *("backend", "client", "connection_file", "generation", "interrupt", "last_error", "log"),
    *("options", "propagate_env", "put", "ranks", "restart", "run", "status", "stop"),
    *("sync_from", "training_ranks", "world_size", "hosts", "submit", "map", "executor"),
)
_WARNING_S = 120.0


@dataclass(frozen=True, slots=True)
class HostInfo:
    """A host of a pool at one moment, in words; `Pool.ranks` has more of its ranks.

    `state` is "up", or why not. `gpus` are those that its ranks have. The others reach it at
    `address`. `nccl` says what NCCL has chosen to send by, "" without it.
    """

    name: str
    state: str
    ranks: str
    gpus: str
    address: str
    nccl: str = ""


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """A pool at one moment. `state` is "idle", "busy", "replacing" (ranks, which takes a moment),
    "broken" or "stopped"; `reason` why so. `pids` has the ranks that have a process;
    `replaced_after` names what runs on them and ends before the others are replaced.

    `env` maps the names of propagated variables to fingerprints of their values; `credentials`
    says until when the AWS credentials are good that `--aws` has sent. `why_cpu` says why there is
    no GPU, where one would have been taken. `idle_left_s` are the seconds until the pool stops
    unless it is used, of `idle_timeout_s` in all.
    `calls` are the numbers of the calls that run (cells, trainings); each has one of its own.
    """

    state: str
    reason: str
    backend: str
    generation: int
    ranks: tuple[Rank, ...]
    pids: Mapping[int, int]
    env: Mapping[str, str]
    idle_left_s: float | None
    training_ranks: tuple[int, ...]
    training_backend: str
    why_cpu: str
    replaced_after: tuple[str, ...] = ()
    idle_timeout_s: float | None = None
    credentials: str = ""
    calls: tuple[int, ...] = ()

    @property
    def stops_soon(self) -> bool:
        """Whether the time without use is nearly over: its last quarter, at most two minutes."""
        left, limit = self.idle_left_s, self.idle_timeout_s
        if left is None or limit is None or self.state not in ("idle", "broken"):
            return False
        return left <= min(_WARNING_S, limit / 4)
