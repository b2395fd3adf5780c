"""What checks work at: a pool of their own, and a folder. Runs on the client."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

import gpupool
from gpupool.core.errors import SpmdError

if TYPE_CHECKING:
    from torch import nn

    from gpupool import Pool, TrainingResult

HANG_AFTER_S = 3.0
START_S = 180.0  # on a machine whose driver and file system have slept
SUM = "x = torch.ones(1, device=device)\ndist.all_reduce(x)\nx.item()"
Tell = Callable[[str], None]  # what was found of a promise that is kept, in words
_T = TypeVar("_T")


class Bench:
    """The pool of the moment: another one, if the last was broken by a check.

    Args:
        where: the options of `gpupool.start` that say on which devices.
        folder: an empty one, for checkpoints and pictures.
    """

    def __init__(self, where: dict[str, Any], folder: Path) -> None:
        self.folder = folder
        self.start_s = 0.0
        self._where = where
        self._pool: Pool | None = None

    @property
    def pool(self) -> Pool:
        """A pool that works."""
        if self._pool is not None and self._pool.status().state in ("broken", "stopped"):
            self.stop()
        if self._pool is None:
            began = time.monotonic()
            self._pool = gpupool.start(
                **self._where,
                hang_after_s=HANG_AFTER_S,
                timeout_s=START_S,
                idle_timeout="10m",
            )
            self.start_s = time.monotonic() - began
        return self._pool

    def stop(self) -> None:
        """Stop the pool, if there is one."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.stop()

    # ---- what it is --------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether there is a pool at this moment."""
        return self._pool is not None

    @property
    def n(self) -> int:
        """Number of ranks."""
        return self.pool.world_size

    @property
    def last(self) -> int:
        """The last rank, which is the one that suffers."""
        return self.n - 1

    @property
    def on_gpus(self) -> bool:
        """Whether every rank has a GPU."""
        return all(rank.gpu is not None for rank in self.pool.ranks)

    def pids(self) -> dict[int, int]:
        """Rank -> its process."""
        return dict(self.pool.status().pids)

    def needs_ranks(self, number: int = 2) -> None:
        """Skip the promise where there are fewer."""
        if self.n < number:
            pytest.skip(f"needs {number} ranks")

    # ---- what it does ------------------------------------------------------------------------

    def cell(self, source: str, limit_s: float = 60.0) -> dict[int, Any]:
        """The value of a cell on each rank."""
        return dict(self.pool.run(_dedented(source), timeout_s=limit_s))

    def call(self, function: Callable[..., _T], *args: Any, limit_s: float = 60.0) -> dict[int, _T]:
        """What a function returns on each rank."""
        return dict(self.pool.run(function, *args, timeout_s=limit_s))

    def begin(
        self, source: str, on_notice: Callable[[str | None], None] = lambda text: None
    ) -> Any:
        """Begin a cell on all ranks: an execution with `wait`, `interrupt`, `done` and `error`."""
        return self.pool.begin(
            _dedented(source),
            ranks=range(self.n),
            on_output=lambda *_: None,
            on_notice=on_notice,
        )

    def error_of(self, source: str) -> SpmdError:
        """The error of a cell. Fails if there is none."""
        with pytest.raises(SpmdError) as caught:
            self.cell(source)
        return caught.value

    def healthy(self, limit_s: float = 90.0) -> float:
        """Seconds until a collective gives the right sum on every rank.

        Fails if it is wrong.
        """
        began = time.monotonic()
        # a group that is half aborted may answer too, but not with the right sum
        found = self.cell(SUM, limit_s)
        assert set(found.values()) == {float(self.n)}, f"afterwards all_reduce gives {found}"
        return time.monotonic() - began

    def train(self, model: nn.Module, data: Any, **options: Any) -> TrainingResult:
        """Train quietly on this pool."""
        assert self.pool is not None  # `train` would start one of its own
        return gpupool.train(
            model, data, options=gpupool.TrainingOptions(progress="none", **options)
        )


class Kept:
    """The processes and a variable of each rank, to be compared with those after a fault."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        bench.cell("kept = rank")
        self.pids = bench.pids()

    def compare(self, replaced: int | None = None) -> None:
        """Fail if a rank but `replaced` has lost its process or variable, or that one has not."""
        after, found = self._bench.pids(), self._bench.cell("globals().get('kept')")
        is_other = {rank: after[rank] != pid for rank, pid in self.pids.items()}
        assert is_other == {rank: rank == replaced for rank in self.pids}, f"replaced: {is_other}"
        lost = [rank for rank in self.pids if rank != replaced and found[rank] != rank]
        assert not lost, f"rank {lost} has lost its variables"


def _dedented(source: str) -> str:
    return textwrap.dedent(source).strip()
