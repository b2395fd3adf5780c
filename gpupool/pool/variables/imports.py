"""The imports that cells have made on ranks, for ranks that are new. Pure; on the client."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping

Statements = Mapping[str, tuple[str, ...]]  # name -> what has bound it, as source


class Imports:
    """Rank -> the statements of its cells, until their names are bound to something else."""

    def __init__(self) -> None:
        self._made: dict[int, dict[str, tuple[str, ...]]] = {}
        self._missing: dict[int, dict[str, tuple[str, ...]]] = {}

    def begin(self, rank: int, statements: Statements, names: Iterable[str]) -> list[str]:
        """A cell with these imports begins on a rank, which binds `names` otherwise.

        Returns:
            What the rank has to run before it: statements of earlier cells, if it is new.
        """
        missing = [line for lines in self._missing.pop(rank, {}).values() for line in lines]
        made = self._made.setdefault(rank, {})
        # Removed first: what is imported again stands last, as the order of imports may matter.
        for name in (*statements, *names):
            made.pop(name, None)
        made.update(statements)
        return missing

    def lose(self, rank: int) -> list[str]:
        """A rank is new; gives the names that its cells had imported."""
        # `_made` stays: a rank that is replaced again before a cell came needs the same.
        made = self._made.get(rank, {})
        self._missing[rank] = dict(made)
        return list(made)


def submodules(module: str, attributes: Iterable[str]) -> Iterator[str]:
    """Loaded submodules of a module that code may mean which mentions these attributes."""
    for attribute in attributes:
        name = f"{module}.{attribute}"
        if name in sys.modules:
            yield name
            yield from submodules(name, attributes)
