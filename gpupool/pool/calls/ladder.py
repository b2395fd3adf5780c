"""What is done about ranks that do not end by themselves, and when. Pure; runs on the client."""

from __future__ import annotations

from enum import Enum

GRACE_S = 0.25  # after a first failure the others may still finish or fail by themselves
ABORT_S = GRACE_S + 0.05  # who is not blocked has left its collectives by then: see abort.py
AGAIN_S = 1.0  # code may have caught the interrupt, or begun another collective
WARN_S = 3.0
KILL_S = 10.0  # some save what they have when they are interrupted, and need their time


class Rung(Enum):
    """A step of the ladder."""

    INTERRUPT = "raise KeyboardInterrupt"
    ABORT = "abort the collectives"
    AGAIN = "raise KeyboardInterrupt once more, and abort the collectives"
    WARN = "say that the rank is going to be replaced"
    KILL = "end the process"


class Ladder:
    """The steps that are due, each once. Times are of one clock, in seconds.

    Args:
        scale: of all these times.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self._later = [
            (GRACE_S * scale, Rung.INTERRUPT),
            (ABORT_S * scale, Rung.ABORT),
            (AGAIN_S * scale, Rung.AGAIN),
            (WARN_S * scale, Rung.WARN),
        ]
        self.kills_after_s = (KILL_S - WARN_S) * scale  # from the warning on
        self._began: float | None = None
        self._warned: float | None = None
        self._presses_before = 0  # that came before the warning
        self._is_through = self._has_heard = False
        self.agreed = False  # the user has pressed again after the warning

    def due(self, now: float, presses: int) -> list[Rung]:
        """The steps that are due, given that something has gone wrong and ranks still run.

        Args:
            presses: how often the user has asked for the end; 0 if another rank has failed.
        """
        self._began = now if self._began is None else self._began
        steps = []
        if presses and not self._has_heard:  # also after an error's own interrupt
            self._has_heard = True
            self._later = [step for step in self._later if step[1] is not Rung.INTERRUPT]
            steps.append(Rung.INTERRUPT)
        if self._warned is not None and not self._is_through:
            self.agreed = presses > self._presses_before
            if self.agreed or now - self._warned >= self.kills_after_s:
                self._is_through = True
                steps.append(Rung.KILL)
        while self._later and now - self._began >= self._later[0][0]:
            steps.append(self._later.pop(0)[1])
        if Rung.WARN in steps:
            self._warned, self._presses_before = now, presses
        return steps

    def spare(self, now: float) -> None:
        """Kill later: whoever does not react is going to."""
        self._warned, self._is_through = now, False
