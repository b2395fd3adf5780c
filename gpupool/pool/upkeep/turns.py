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
    """A place in the row: the ranks it needs, and what it is called ("cell In[12]").

    One that is first comes before all that wait: the pool is mended in it.
    """

    ranks: frozenset[int]
    name: str
    is_first: bool = False
    began: bool = False


class Turns:
    """The row of a pool. `reform()` forms the process group again."""

    def __init__(self, reform: Callable[[], None]) -> None:
        self._reform = reform
        self._row: list[Turn] = []
        self._changed = threading.Condition()
        self._needs_reform = False
        self._forms = False

    def ask(self, ranks: Iterable[int], name: str, *, first: bool = False) -> Turn:
        """A place at the end of the row, or before all that wait."""
        turn = Turn(frozenset(ranks), name, first)
        with self._changed:
            running = [number for number, other in enumerate(self._row) if other.began]
            place = (running[-1] + 1 if running else 0) if first else len(self._row)
            self._row.insert(place, turn)
        return turn

    def are_in_use(self, ranks: Iterable[int]) -> bool:
        """Whether something runs on these ranks, or waits for them."""
        with self._changed:
            return any(turn.ranks.intersection(ranks) for turn in self._row)

    def begin(self, turn: Turn, timeout_s: float | None = 0.0) -> list[str]:
        """Begin as soon as nothing is in the way; after `timeout_s` the names of what still is."""
        with self._changed:
            turn.began = self._changed.wait_for(lambda: not self._ahead(turn), timeout_s)
            return [] if turn.began else self._ahead(turn)

    @property
    def mending_waits_for(self) -> tuple[str, ...]:
        """The names of what runs, and ends before a turn that is first begins."""
        with self._changed:
            waiting = [turn for turn in self._row if turn.is_first and not turn.began]
            return tuple(dict.fromkeys(name for turn in waiting for name in self._ahead(turn)))

    def _ahead(self, turn: Turn) -> list[str]:
        before = self._row[: self._row.index(turn)]
        return [t.name for t in before if self._needs_reform or t.ranks & turn.ranks]

    def wait_until_mended(self) -> None:
        """Wait until the group is not being formed, and nothing that is first is in the row."""
        with self._changed:
            self._changed.wait_for(
                lambda: not (self._forms or any(turn.is_first for turn in self._row))
            )

    def wait_until_formed(self) -> None:
        """Wait until the group is not being formed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._forms)

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
        with self._changed:
            self._needs_reform = self._needs_reform or broke_group
            in_use = any(other.began for other in self._row if other is not turn)
            if not (turn.began and self._needs_reform and not in_use):
                self._leave(turn)
                return
            self._forms = True
        try:
            before_forming()
            self._reform()
        finally:
            with self._changed:
                self._needs_reform = self._forms = False
                self._leave(turn)

    def _leave(self, turn: Turn) -> None:
        self._row.remove(turn)
        self._changed.notify_all()
