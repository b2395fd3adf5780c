"""Who may use the ranks of a pool when. Runs on the client.

Two cells must not mix on a rank: an error in one aborts the collectives of the other, and an
interrupt would meet the wrong one. So what needs a rank that is in use waits its turn, in the order
of asking.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["", "task", "replaces", "forms"]


@dataclass(eq=False, slots=True)
class Turn:
    """A place in the row: the ranks it needs, and what it is called ("cell In[12]").

    Those in which the pool "replaces" ranks and "forms" the group come before all that wait. A
    "task" needs no group: it does not wait for its forming, unless somebody waits who does.
    """

    ranks: frozenset[int]
    name: str
    kind: Kind = ""
    began: bool = False

    @property
    def is_first(self) -> bool:
        return self.kind in ("replaces", "forms")


class Turns:
    """The row of a pool; `changed` is notified when somebody leaves it."""

    def __init__(self, changed: threading.Condition) -> None:
        self._row: list[Turn] = []
        self._changed = changed

    def ask(self, ranks: Iterable[int], name: str, kind: Kind = "") -> Turn:
        """A place at the end of the row, or before all that wait."""
        turn = Turn(frozenset(ranks), name, kind)
        with self._changed:
            waiting = [number for number, other in enumerate(self._row) if not other.began]
            self._row.insert(waiting[0] if turn.is_first and waiting else len(self._row), turn)
        return turn

    def begin(self, turn: Turn, timeout_s: float | None = 0.0) -> list[str]:
        """Begin as soon as nothing is in the way; after `timeout_s` the names of what still is."""
        with self._changed:
            turn.began = self._changed.wait_for(lambda: not self._ahead(turn), timeout_s)
            return [] if turn.began else self._ahead(turn)

    def end(self, turn: Turn) -> None:
        with self._changed:
            self._row.remove(turn)
            self._changed.notify_all()

    def are_in_use(self, ranks: Iterable[int]) -> bool:
        """Whether something runs on these ranks, or waits for them."""
        with self._changed:
            return any(turn.ranks.intersection(ranks) for turn in self._row)

    @property
    def mending_waits_for(self) -> tuple[str, ...]:
        """The names of what runs, and ends before a turn that is first begins."""
        with self._changed:
            waiting = [turn.ranks for turn in self._row if turn.is_first and not turn.began]
            running = [turn for turn in self._row if turn.began and not turn.is_first]
            found = (one.name for one in running if any(one.ranks & other for other in waiting))
            return tuple(dict.fromkeys(found))

    def _ahead(self, turn: Turn) -> list[str]:
        before = self._row[: self._row.index(turn)]
        # One that is first waits also for those that run and have asked later than some that wait.
        ahead = [one for one in self._row if one is not turn and (one in before or one.began)]
        if turn.kind == "task" and all(
            one.began or one.is_first or one.kind == "task" for one in self._row
        ):
            ahead = [one for one in ahead if one.began or one.kind != "forms"]
        return list(dict.fromkeys(one.name for one in ahead if one.ranks & turn.ranks))
