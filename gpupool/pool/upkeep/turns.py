"""Who may use the ranks of a pool when. Runs on the client.

Two cells must not mix on a rank: an error in one aborts the collectives of the other, and an
interrupt would meet the wrong one. So what needs a rank that is in use waits its turn, in the order
of asking. The process group can be formed again only when no rank is in use; when that has to be
done, nothing new begins before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Turn:
    """A place in the row: the ranks it needs, and what it is called ("cell In[12]")."""

    ranks: frozenset[int]
    name: str
    began: bool = False


class Turns:
    """The row of a pool. `reform()` forms the process group again."""

    def __init__(self, reform: Callable[[], None]) -> None:
        self._reform = reform
        self._row: list[Turn] = []
        self._lock = threading.Lock()
        self._needs_reform = False
        self._formed = threading.Event()
        self._formed.set()

    def ask(self, ranks: Iterable[int], name: str, *, first: bool = False) -> Turn:
        """A place at the end of the row, or before all that wait."""
        turn = Turn(frozenset(ranks), name)
        with self._lock:
            running = [number for number, other in enumerate(self._row) if other.began]
            place = (running[-1] + 1 if running else 0) if first else len(self._row)
            self._row.insert(place, turn)
        return turn

    def are_in_use(self, ranks: Iterable[int]) -> bool:
        """Whether something runs on these ranks, or waits for them."""
        with self._lock:
            return any(turn.ranks.intersection(ranks) for turn in self._row)

    def begin(self, turn: Turn) -> list[str]:
        """Begin if nothing is in the way; else the names of what is."""
        with self._lock:
            ahead = self._ahead(turn)
            turn.began = not ahead
        return ahead

    def ahead(self, turn: Turn) -> list[str]:
        """The names of what is in the way; none of a turn that has begun, or ended."""
        with self._lock:
            return [] if turn.began or turn not in self._row else self._ahead(turn)

    def _ahead(self, turn: Turn) -> list[str]:
        before = self._row[: self._row.index(turn)]
        return [t.name for t in before if self._needs_reform or t.ranks & turn.ranks]

    def wait_until_formed(self) -> None:
        """Wait until the group is not being formed."""
        while not self._formed.wait(0.1):  # in slices, to hear an interrupt on every platform
            pass

    def end(
        self,
        turn: Turn,
        *,
        broke_group: bool = False,
        before_forming: Callable[[], None] = lambda: None,
    ) -> None:
        """Leave the row. The last one that runs forms the group again if anyone broke it.

        Args:
            before_forming: called when `wait_until_formed` has begun to wait for that.
        """
        with self._lock:
            self._needs_reform = self._needs_reform or broke_group
            in_use = any(other.began for other in self._row if other is not turn)
            reforms = turn.began and self._needs_reform and not in_use
            if not reforms:
                self._row.remove(turn)
                return
            self._formed.clear()
        try:
            before_forming()
            self._reform()
        finally:
            with self._lock:
                self._needs_reform = False
                self._row.remove(turn)
                self._formed.set()
