"""What names mean in notebook and ranks, as the documentation says it: in plain Python alone.

A model of a notebook and its pool. A cell is run by `exec` in a dict for each rank, so a list that
two names share, or that is changed in place, is one here too. Nothing of gpupool is used.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any


class No(Enum):
    """Why a rank has no value by a name that the notebook has for what the ranks have."""

    LOST = "the rank that had it was replaced"
    NEVER = "no cell has given it one"


@dataclass(frozen=True)
class Either:
    """One of several values: what ended the cell came at any moment of it."""

    values: tuple[Any, ...]


class Model:
    """The names of a notebook, and those of its ranks."""

    def __init__(self, world_size: int) -> None:
        self.notebook: dict[str, Any] = {}  # its own values
        self.handles: set[str] = set()  # its names for what the ranks have
        self.ranks: list[dict[str, Any]] = [{} for _ in range(world_size)]
        self._sent: list[dict[str, Any]] = [{} for _ in range(world_size)]
        self._lost: dict[str, set[int]] = {}

    @property
    def names(self) -> list[str]:
        """All names of the notebook."""
        return sorted({*self.notebook, *self.handles})

    def run_here(self, source: str, assigns: str = "") -> None:
        """A cell of the notebook's own."""
        exec(source, {}, self.notebook)
        self.handles -= set(assigns.split())

    def run(
        self, source: str, reads: str = "", assigns: str = "", ranks: Iterable[int] | None = None
    ) -> None:
        """A cell on all ranks, or some; of the notebook's values it `reads` these.

        A value is sent if it is not the one that was sent last; else the rank's own copy stays.
        """
        chosen = range(len(self.ranks)) if ranks is None else list(ranks)
        for rank in chosen:
            have, sent = self.ranks[rank], self._sent[rank]
            for name in set(reads.split()) & self.notebook.keys():
                if name not in sent or sent[name] != self.notebook[name]:
                    have[name] = copy.deepcopy(self.notebook[name])
                    sent[name] = copy.deepcopy(self.notebook[name])
            exec(source, {"rank": rank, "world_size": len(self.ranks)}, have)
        for name in assigns.split():  # the notebook's become handles of what the ranks have
            self.notebook.pop(name, None)
            self._lost.pop(name, None)
            for rank in chosen:
                self._sent[rank].pop(name, None)
            self.handles.add(name)

    def lose(self, ranks: Iterable[int]) -> None:
        """These ranks were replaced."""
        for rank in ranks:
            for name in self.handles & self.ranks[rank].keys():
                self._lost.setdefault(name, set()).add(rank)
            self.ranks[rank], self._sent[rank] = {}, {}

    def value(self, name: str, rank: int) -> Any:
        """What `name[rank]` is in the notebook: a value, an `Either` or a `No`."""
        if name in self.ranks[rank]:
            return self.ranks[rank][name]
        return No.LOST if rank in self._lost.get(name, ()) else No.NEVER

    def whole(self) -> list[str]:
        """Handles of which every rank has a value."""
        return [n for n in sorted(self.handles) if all(n in have for have in self.ranks)]
