"""Whether a pool can be used; if not, why, and what mends it. Runs on the client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from gpupool.core.errors import PoolError
from gpupool.core.wire.masking import Secrets, redact
from gpupool.pool.engines.engines import NEW_POOL, with_log


class Health:
    """What has gone wrong with a pool. Any thread may call it.

    `reason` is the first thing that has, "" while all is well, and after the end why it came.
    `on_change` is called when the pool is given up or is mended.
    """

    def __init__(self, secrets: Secrets, on_change: Callable[[], None]) -> None:
        self.stopped = False
        self.reason = ""
        self.num_losses = 0  # of ranks
        self._secrets = secrets
        self._on_change = on_change
        self._lock = threading.Lock()
        self._log_tail = ""  # of the process whose end broke the pool
        self._lost: dict[int, tuple[int, str]] = {}  # rank -> number of its loss, how it ended
        self._is_given_up = False  # they are not replaced without being asked
        self._beyond_repair = False

    @property
    def state(self) -> str:
        """ "stopped", "broken", "replacing" (lost ranks) or "well"."""
        if self.stopped:
            return "stopped"
        if not self.reason:
            return "well"
        return "broken" if self._is_given_up or self._beyond_repair else "replacing"

    @property
    def lacks_group(self) -> bool:
        """Whether all ranks are there, and only their process group could not be formed."""
        return self._is_given_up and not (self.stopped or self._beyond_repair or self._lost)

    @property
    def full_reason(self) -> str:
        """The reason, with the end of a log below it; "" while all is well."""
        return with_log(self.reason, self._log_tail)

    @property
    def lost(self) -> dict[int, str]:
        """The ranks that are to be replaced -> how they ended, as in "was killed by SIGKILL"."""
        with self._lock:
            return {rank: how for rank, (_, how) in self._lost.items()}

    def end(self, reason: str) -> bool:
        """The pool is being stopped; returns whether it was not so before."""
        with self._lock:
            first, self.stopped = not self.stopped, True
            if first:
                self.reason = reason
        return first

    def lose(self, sentence: str, log_tail: str, rank: int | None) -> None:
        """A process has ended: the engine of a rank, or for None one that all ranks need.

        Calls nobody: whoever notes it reports it, when it has acted on it.
        """
        with self._lock:
            if rank is None:
                self._beyond_repair, self.reason = True, ""  # there is nothing worse
            else:
                if self.lacks_group:  # which is formed again when the rank is replaced
                    self._is_given_up, self.reason = False, ""
                how = sentence.removeprefix(f"rank {rank} ").removesuffix(".")
                self.num_losses += 1
                self._lost[rank] = self.num_losses, redact(how, self._secrets)
            self._set_reason(sentence, log_tail)

    def give_up(self, reason: str, ranks: Iterable[int]) -> None:
        """From now on every run is refused with this reason, until these ranks are restarted.

        Without ranks it is the process group that is missing: the next run forms it first.
        """
        with self._lock:
            if self.stopped:
                return
            self._is_given_up, self.reason = True, ""
            for rank in ranks:
                self._lost.setdefault(rank, (self.num_losses, "could not be used any more"))
            self._set_reason(reason, "")
        self._on_change()

    def mark_mended(self, ranks: Iterable[int], num_losses: int) -> None:
        """These ranks have been replaced; all is well if there is nothing else.

        Args:
            num_losses: how many there had been when it began; one that has died since is lost.
        """
        with self._lock:
            # One that has died during its replacement has a higher number, and stays lost.
            for rank in ranks:
                if rank in self._lost and self._lost[rank][0] <= num_losses:
                    del self._lost[rank]
            if not (self.stopped or self._beyond_repair or self._lost):
                self.reason, self._log_tail, self._is_given_up = "", "", False
        self._on_change()

    def require_usable(self) -> None:
        """Raise the PoolError that says why nothing can run, if so."""
        if self.stopped:
            raise PoolError(
                "this pool was stopped. `%gpupool start` (gpupool.start()) makes a new one."
            )
        if self.reason:
            ranks = ",".join(map(str, sorted(self.lost)))
            if self._beyond_repair:
                way_on = NEW_POOL
            elif self.lacks_group:
                way_on = "The ranks keep their variables, and the next run tries again."
            elif self._is_given_up:
                way_on = f"`%gpupool restart {ranks}` replaces it; the other ranks keep theirs."
            else:
                way_on = f"Rank {ranks} is being replaced: run it again in a moment."
            raise PoolError(
                with_log(f"{self.reason} {way_on}", self._log_tail), ranks=sorted(self.lost)
            )

    def require_restartable(self) -> None:
        """Raise the PoolError that says why no restart of ranks is enough, if so."""
        if self.stopped or self._beyond_repair:
            self.require_usable()

    def _set_reason(self, reason: str, log_tail: str) -> None:
        """Keep the first one; with the lock held."""
        if not (self.reason or self.stopped):
            self.reason = redact(reason, self._secrets)
            self._log_tail = redact(log_tail, self._secrets)
