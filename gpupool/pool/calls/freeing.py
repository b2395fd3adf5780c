"""What is done about ranks that do not end a call by themselves, and when. Runs on the client.

The ladder decides, by a clock that it is given. `Freeing` acts on it: it interrupts, aborts, warns
and kills. Used by the thread that supervises a call.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from enum import Enum, auto

from gpupool.core.errors import RankError
from gpupool.core.wire.location import Location
from gpupool.core.wire.replies import Raised
from gpupool.core.wire.requests import Answer, Where
from gpupool.pool.launchers.processes import DIE_S
from gpupool.pool.notices import OnNotice
from gpupool.pool.ranks import Ranks

GRACE_S = 0.25  # after a first failure the others may still finish or fail by themselves
ABORT_S = GRACE_S + 0.05  # who is not blocked has left its collectives by then: see abort.py
AGAIN_S = 1.0  # code may have caught the interrupt, or begun another collective
WARN_S = 3.0
KILL_S = 10.0  # some save what they have when they are interrupted, and need their time
_ANSWER_S = 0.1  # for a rank to answer where it is; one that runs C code may not


class Rung(Enum):
    INTERRUPT = auto()
    ABORT = auto()  # their collectives
    AGAIN = auto()  # both
    WARN = auto()  # the user: the rank is going to be replaced
    KILL = auto()


class Ladder:
    """The steps that are due, each once. Times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._later = [
            (GRACE_S, Rung.INTERRUPT),
            (ABORT_S, Rung.ABORT),
            (AGAIN_S, Rung.AGAIN),
            (WARN_S, Rung.WARN),
        ]
        self._began: float | None = None
        self._presses_before = 0  # that came before the warning
        self._has_heard = False

    def due(self, now: float, presses: int) -> list[Rung]:
        """The steps that are due, given that something has gone wrong and ranks still run.

        Args:
            presses: how often the user has asked for the end; 0 if another rank has failed. One
                after the warning agrees to it.
        """
        self._began = now if self._began is None else self._began
        steps = []
        if presses and not self._has_heard:  # also after an error's own interrupt
            self._has_heard = True
            self._later = [step for step in self._later if step[1] is not Rung.INTERRUPT]
            steps.append(Rung.INTERRUPT)
        if [rung for _, rung in self._later] == [Rung.KILL] and presses > self._presses_before:
            self._later = [(0.0, Rung.KILL)]
        while self._later and now - self._began >= self._later[0][0]:
            steps.append(self._later.pop(0)[1])
        if Rung.WARN in steps:
            self._presses_before = presses
            self._later = [(now - self._began + KILL_S - WARN_S, Rung.KILL)]
        return steps


class Freeing:
    """Ends a call, known by its number, on ranks that do not end it by themselves.

    `freed_at`: when the ranks were first interrupted (seconds since the epoch), if they were.
    `has_aborted`: their collectives were aborted, so that the group has to be formed again.
    """

    def __init__(
        self,
        all_ranks: Ranks,
        ranks: Sequence[int],
        number: int,
        on_notice: OnNotice,
        is_task: bool,
    ) -> None:
        self.freed_at: float | None = None
        self.has_aborted = False
        self._all_ranks, self._ranks, self._number = all_ranks, ranks, number
        self._notice, self._is_task = on_notice, is_task
        self._ladder = Ladder()
        self._killed_at: float | None = None
        self._answers: dict[int, Future[Answer[Location]]] | None = None

    @property
    def where(self) -> dict[int, Location]:
        """Where ranks were just before the first of them was freed."""
        return {rank: was for rank, was in self._found().items() if not was.idle}

    def step(self, now: float, presses: int, pending: Sequence[int]) -> None:
        for rung in self._ladder.due(now, presses):
            if self._answers is None:  # before the first is freed, which frees its peers
                self._notice(None)  # what was told is being ended
                self._answers = self._all_ranks.engines.control(Where(), pending)
                wait(self._answers.values(), timeout=_ANSWER_S)
            self._climb(rung, pending)

    def given_up(self, now: float, ranks: Sequence[int]) -> dict[int, Raised]:
        """Give these ranks up if they were killed and are still there; how each of them failed."""
        if self._killed_at is None or now - self._killed_at <= DIE_S:
            return {}
        listed = ", ".join(map(str, ranks))
        reason = f"rank {listed} did not react to the interrupt, and cannot be killed"
        self._all_ranks.give_up(f"{reason}.", ranks)
        at = time.time()
        return {r: Raised(RankError(r, "Unresponsive", reason, failed_at=at)) for r in ranks}

    def _climb(self, rung: Rung, pending: Sequence[int]) -> None:
        numbers = dict.fromkeys(pending, self._number)
        if rung is Rung.INTERRUPT or (rung is Rung.AGAIN and self._is_task):
            self.freed_at = self.freed_at or time.time()
            self._all_ranks.engines.interrupt(numbers)
        elif rung in (Rung.ABORT, Rung.AGAIN):
            found = self._found()
            is_through = len(found) == len(pending) and all(was.idle for was in found.values())
            # One that is through it may still report its error; a task waits in no collective.
            if not (is_through or self._is_task):
                self.has_aborted = True
                again = numbers if rung is Rung.AGAIN else {}
                # Of those too that have ended: a peer's may continue with one that is through it.
                self._all_ranks.group.abort({rank: again.get(rank) for rank in self._ranks})
        elif rung is Rung.WARN:
            self._notice(
                f"rank {', '.join(map(str, pending))} does not respond to the interrupt. In "
                f"{KILL_S - WARN_S:.0f} s it is killed and replaced, and its variables "
                "are lost. Stop once more to do it now."
            )
        else:
            self._killed_at = time.monotonic()
            for rank in pending:
                self._all_ranks.engines.kill(rank, "did not react to the interrupt, and was killed")

    def _found(self) -> dict[int, Location]:
        answers = (self._answers or {}).items()
        done = {rank: one.result().found for rank, one in answers if one.done()}
        return {rank: where for rank, where in done.items() if where is not None}
