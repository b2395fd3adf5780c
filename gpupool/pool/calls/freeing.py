"""Acts on the ladder: interrupts, aborts, warns, kills ranks that do not end. Runs on the client.

Used by the thread that supervises a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait

from gpupool.core.errors import RankError
from gpupool.core.machine.processes import state_of
from gpupool.core.wire.location import Location
from gpupool.core.wire.requests import Answer, Where
from gpupool.pool.calls.failures import Failure
from gpupool.pool.calls.ladder import Ladder, Rung
from gpupool.pool.launchers.base import DIE_S
from gpupool.pool.ranks import Ranks

ANSWER_S = 0.1  # for a rank to answer where it is; one that runs C code may not


class Freeing:
    """Ends a call, known by its number, on ranks that do not end it by themselves.

    `freed_at`: when the ranks were first interrupted (seconds since the epoch), if they were.
    `has_aborted`: their collectives were aborted, so that the group has to be formed again.
    `has_warned`: it has said that ranks are going to be replaced.
    """

    def __init__(
        self,
        all_ranks: Ranks,
        ranks: Sequence[int],
        number: int,
        notice: Callable[[str], None],
    ) -> None:
        self.freed_at: float | None = None
        self.has_aborted = self.has_warned = False
        self._all_ranks = all_ranks
        self._ranks = ranks
        self._number = number
        self._notice = notice
        self._ladder = Ladder(all_ranks.ladder_scale)
        self._killed_at: float | None = None
        self._answers: dict[int, Future[Answer[Location]]] = {}

    @property
    def where(self) -> dict[int, Location]:
        """Where ranks were just before the first of them was freed."""
        done = {rank: one.result().found for rank, one in self._answers.items() if one.done()}
        return {rank: was for rank, was in done.items() if was is not None and not was.idle}

    def step(self, now: float, presses: int, pending: Sequence[int]) -> None:
        """Do what is due about the ranks that still run.

        Args:
            presses: how often the user has asked for the end.
        """
        for rung in self._ladder.due(now, presses):
            if not self._answers:  # before the first is freed, which frees its peers
                self._answers = self._all_ranks.ask(Where(history=True), pending)
                wait(self._answers.values(), timeout=ANSWER_S)
            self._climb(rung, pending)

    def was_in_vain(self, now: float) -> bool:
        """Whether ranks were killed and are still there."""
        return self._killed_at is not None and now - self._killed_at > DIE_S

    def _climb(self, rung: Rung, pending: Sequence[int]) -> None:
        numbers = dict.fromkeys(pending, self._number)
        if rung is Rung.INTERRUPT:
            self.freed_at = self.freed_at or time.time()
            self._all_ranks.engines.interrupt(numbers)
        elif rung in (Rung.ABORT, Rung.AGAIN):
            if not self._are_through(pending):  # who is may still report its error
                self._abort(numbers if rung is Rung.AGAIN else {})
        elif rung is Rung.WARN:
            self.has_warned = True
            self._notice(self._warning(pending))
        elif not self._ladder.agreed and self._import(pending):
            self._ladder.spare(time.monotonic())
        else:
            self._killed_at = time.monotonic()
            for rank in pending:
                self._all_ranks.engines.kill(rank, "did not react to the interrupt, and was killed")

    def _abort(self, numbers: Mapping[int, int]) -> None:
        """Abort the collectives of all ranks, and interrupt the calls of these numbers.

        Of those too that have ended: a peer's collective may continue with one that is through it.
        """
        self.has_aborted = True
        self._all_ranks.group.abort({rank: numbers.get(rank) for rank in self._ranks})

    def _are_through(self, ranks: Sequence[int]) -> bool:
        """Whether all of them had ended the user's code when they were asked where they are."""
        found = [one.result().found for one in self._answers.values() if one.done()]
        return len(found) == len(ranks) and all(was is not None and was.idle for was in found)

    def _import(self, ranks: Sequence[int]) -> bool:
        """Whether all of them are just importing a library, and hear the interrupt after that."""
        answers = self._all_ranks.ask(Where(), ranks)
        done, _ = wait(answers.values(), timeout=ANSWER_S)
        found = [future.result().found for future in done]
        return len(found) == len(ranks) and all(now is not None and now.imports for now in found)

    def _warning(self, ranks: Sequence[int]) -> str:
        listed = ", ".join(map(str, ranks))
        if self._import(ranks):
            return (
                f"rank {listed} is in the middle of an import and ends the cell after it. "
                "Stop once more to kill and replace it now; its variables are lost then."
            )
        return (
            f"rank {listed} does not respond to the interrupt. In "
            f"{self._ladder.kills_after_s:.0f} s it is killed and replaced, and its variables are "
            "lost. Stop once more to do it now."
        )


def give_up(all_ranks: Ranks, ranks: Sequence[int]) -> dict[int, Failure]:
    """Say that ranks were killed and are still there; how each of them failed."""
    listed = ", ".join(map(str, ranks))
    reason = f"rank {listed} did not react to the interrupt, and cannot be killed"
    if "D" in [state_of(pid) for rank, pid in all_ranks.engines.pids.items() if rank in ranks]:
        reason += ": the kernel of the machine waits for a device (state D)"
    all_ranks.health.give_up(f"{reason}.", ranks)
    now = time.time()
    errors = [RankError(rank, "Unresponsive", reason, failed_at=now) for rank in ranks]
    return {error.rank: Failure(error) for error in errors}
