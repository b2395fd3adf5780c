"""Which values went with ranks that were replaced, and how to say it. Pure; on the client.

Says why a value is not there; that it is not there only its rank knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from gpupool.core.wire.values import NamesReport

# What Python's NameError says, and what a rank says of a name it was asked for.
_MISSING = re.compile(r"name '(\w+)' is not defined|has no variable '(\w+)'")


class Losses:
    """name -> the ranks that had a value and were replaced, until they have one again."""

    def __init__(self, world_size: Callable[[], int]) -> None:
        self._world_size = world_size
        self._lost: dict[str, dict[int, str]] = {}  # name -> rank -> how that rank ended
        self._without: dict[str, set[int]] = {}  # name -> ranks that are known to have had none
        self._with: dict[str, set[int]] = {}  # name -> ranks that had a value after a cell
        self._imported: set[str] = set()
        self._ended: dict[int, str] = {}  # rank -> how the one before it ended

    def lose(self, names: Iterable[str], imported: Iterable[str], rank: int, why: str) -> None:
        """A rank has been replaced: `why` says it, as in "was killed by SIGKILL".

        Args:
            names, imported: what cells have bound, by import or otherwise.
        """
        self._ended[rank] = why
        self._imported.update(imported)
        for there in self._with.values():
            there.discard(rank)
        for name in (*names, *imported):
            if rank not in self._without.get(name, ()):
                # The first reason stays: a rank that dies again without the value loses nothing.
                self._lost.setdefault(name, {}).setdefault(rank, why)

    def note(self, name: str, infos: Mapping[int, object]) -> None:
        """What ranks have by a name now; None stands for nothing."""
        self.found([name], [rank for rank, info in infos.items() if info is not None])
        # A rank that never had the name has lost nothing when it is replaced.
        without = {rank for rank, info in infos.items() if info is None} - self.of(name).keys()
        self._without.setdefault(name, set()).update(without)
        self._with[name] -= {rank for rank, info in infos.items() if info is None}

    def found(self, names: Iterable[str], ranks: Iterable[int]) -> None:
        """These ranks have a value by these names."""
        there = set(ranks)
        for name in names:
            self._with.setdefault(name, set()).update(there)
            self._without.get(name, set()).difference_update(there)
            left = {rank: why for rank, why in self.of(name).items() if rank not in there}
            self._lost[name] = left

    def end(self, name: str) -> None:
        """The name means something else from now on, or nothing."""
        self._lost.pop(name, None)
        self._without.pop(name, None)
        self._with.pop(name, None)
        self._imported.discard(name)

    def of(self, name: str) -> Mapping[int, str]:
        """The ranks whose values are lost, and how those ranks ended."""
        return self._lost.get(name, {})

    def sentence(self, name: str, rank: int | None = None, what: str = "") -> str:
        """Says that a value (of a rank, or of all) is lost, and what to do; "" if none is.

        >>> losses = Losses(lambda: 2)
        >>> losses.lose(["x"], [], 1, "was restarted")
        >>> losses.sentence("x", 1)
        "x was lost with rank 1, which was restarted; pool.sync_from(0, 'x', ranks=[1]) copies it."
        """
        lost = self.of(name)
        ranks = sorted(lost) if rank is None else [rank] * (rank in lost)
        if not ranks:
            return ""
        ended = ", ".join(f"rank {r}, which {lost[r]}" for r in ranks)
        # A rank that never had the name is no source either.
        without = {*lost, *self._without.get(name, ())}
        source = next((r for r in range(self._world_size()) if r not in without), None)
        if name in self._imported:
            way_on = "import it there again."
        elif source is None:
            way_on = "no other rank has it: recreate it."
        else:
            way_on = f"pool.sync_from({source}, {name!r}, ranks={ranks}) copies it."
        return f"{what or name} was lost with {ended}; {way_on}"

    def hint(
        self,
        rank: int,
        evalue: str,
        is_alone: bool,
        reports: Mapping[int, NamesReport] = MappingProxyType({}),
    ) -> tuple[str, str, tuple[str, ...]]:
        """What to add to a rank's error if it says that a name means nothing there, the error's
        kind, and the name.

        `is_alone`: no other rank says so. Then it may be lost, though nobody knows the name.
        `reports` are what the ranks' names mean after that cell.
        """
        found = _MISSING.search(evalue)
        if not found:
            return "", "", ()
        name = found[1] or found[2]
        lost = self.sentence(name, rank)
        if not lost and is_alone and rank in self._ended:
            lost = (
                f"what its cells had bound unseen, as by exec, %run or `import *`, was lost with "
                f"rank {rank}, which {self._ended[rank]}: run such a cell again"
            )
        if lost:
            return f" ({lost.rstrip('.')})", "lost", (name,)
        there = self._with.get(name, set()) | {
            other for other, report in reports.items() if report.info.get(name) is not None
        }
        if not there or rank in there:
            return "", "", ()
        lacking = [r for r in range(self._world_size()) if r not in there]
        have = f"ranks {', '.join(map(str, sorted(there)))} have"
        have = have if len(there) > 1 else f"rank {min(there)} alone has"
        way_on = f"pool.sync_from({min(there)}, {name!r}, ranks={lacking}) copies it"
        return f" ({have} it: assign it on every rank, or {way_on})", "elsewhere", (name,)
