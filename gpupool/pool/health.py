"""Whether a pool can be used; if not, why, and what mends it. Runs on the client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from gpupool.core.errors import PoolError
from gpupool.core.masking import Secrets, redact
from gpupool.pool.engines import with_log


class Health:
    """What has gone wrong with a pool. Any thread may call it.

    `reason` is the first thing that has, "" while all is well, and after the end why it came.
    `on_change` is called when the pool breaks or is mended.
    """

    def __init__(self, secrets: Secrets, on_change: Callable[[], None]) -> None:
        self.stopped = False
        self.reason = ""
        self._secrets = secrets
        self._on_change = on_change
        self._lock = threading.Lock()
        self._log_tail = ""  # of the process whose end broke the pool
        self._to_replace: set[int] = set()  # ranks whose restart mends it
        self._ends: dict[int, str] = {}  # how they ended
        self._beyond_repair = False

    @property
    def state(self) -> str:
        """ "stopped", "broken" or "well"."""
        return "stopped" if self.stopped else "broken" if self.reason else "well"

    def end(self, reason: str) -> bool:
        """The pool is being stopped; tells whether it was not so before."""
        with self._lock:
            first, self.stopped = not self.stopped, True
            if first:
                self.reason = reason
        return first

    def lose(self, sentence: str, log_tail: str, rank: int | None) -> None:
        """A process has ended: the engine of a rank, or for None one that all ranks need."""
        if rank is None:
            self._beyond_repair = True
        else:  # "rank 1 was killed by SIGKILL; its variables are lost."
            how = sentence.removeprefix(f"rank {rank} ").partition("; its variables")[0]
            self._ends[rank] = redact(how, self._secrets)
        self.mark_broken(sentence, () if rank is None else [rank], log_tail)

    def mark_broken(self, reason: str, ranks: Iterable[int] = (), log_tail: str = "") -> None:
        """From now on every run is refused with this reason, until these ranks are restarted."""
        with self._lock:
            self._to_replace.update(ranks)
            if self.reason or self.stopped:
                return
            self.reason = redact(reason, self._secrets)
            self._log_tail = redact(log_tail, self._secrets)
        self._on_change()

    def end_of(self, rank: int) -> str:
        """How the rank's process ended by itself, as in "was killed by SIGKILL"; "" if not."""
        return self._ends.pop(rank, "")

    def mark_mended(self, ranks: Iterable[int]) -> None:
        """These ranks have been replaced; all is well if there is nothing else."""
        with self._lock:
            self._to_replace.difference_update(ranks)
            if not (self.stopped or self._beyond_repair or self._to_replace):
                self.reason, self._log_tail = "", ""
        self._on_change()

    def require_usable(self) -> None:
        """Raise the PoolError that says why nothing can run, if so."""
        if self.stopped:
            raise PoolError(
                "this pool was stopped. `%gpupool start` (gpupool.start()) makes a new one."
            )
        if self.reason:
            ranks = ",".join(map(str, sorted(self._to_replace)))
            if self._beyond_repair:
                way_on = "`%gpupool stop`, then `%gpupool start`, makes a new pool."
            else:
                way_on = f"`%gpupool restart {ranks}` replaces it; the other ranks keep theirs."
            raise PoolError(with_log(f"{self.reason} {way_on}", self._log_tail))

    def require_restartable(self, ranks: Iterable[int]) -> None:
        """Raise the PoolError that says why a restart of these ranks is not enough, if so."""
        if self.stopped or self._beyond_repair:
            self.require_usable()
        others = sorted(self._to_replace - set(ranks))
        if others:
            raise PoolError(
                f"{self.reason} Restart rank {', '.join(map(str, others))} as well: "
                "`%gpupool restart` restarts all."
            )
