"""What is known of the names on the ranks, and what went with ranks that were replaced.

Pure; on the client. What a name means there only its rank knows.
"""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Iterable, Mapping

from gpupool.core.errors import PoolError
from gpupool.core.wire.global_names import RANK_NAMES

Statements = Mapping[str, tuple[str, ...]]  # name -> the imports that have bound it, as source

_SHELL_NAMES = frozenset({"_", "_i", "_ii", "_iii", "_oh", "_ih", "_dh", "In", "Out"})
# What Python's NameError says, and what a rank says of a name it was asked for.
_MISSING = re.compile(r"name '(\w+)' is not defined|has no variable '(\w+)'")


def is_hidden(name: str) -> bool:
    """Whether a name is IPython's or Python's own on each side: _, _12, In, __name__."""
    return (
        name.startswith("__")
        or name in _SHELL_NAMES
        or (name.startswith("_") and name.strip("_").lstrip("i").isdigit())
    )


def is_of_shell(name: str, value: object) -> bool:
    """Whether this is what IPython has put under the name, as `open`."""
    # By the value: users give these names to their own things, `from smart_open import open`.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return value is not None and shell is not None and shell.user_ns_hidden.get(name) is value


def require_name(name: str) -> None:
    """Raise a PoolError for a name that the notebook cannot give to a value on the ranks."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise PoolError(f"{name!r} is no name of a variable.")
    if name in RANK_NAMES or is_hidden(name):
        raise PoolError(f"{name} is the rank's own: choose another name.")


class Losses:
    """The names that each rank has had, and the imports that cells have made.

    >>> losses = Losses()
    >>> losses.note("x", {0: 5, 1: 5})
    >>> losses.lose(1, "was restarted")
    >>> losses.sentence("x")
    "x was lost with rank 1, which was restarted; pool.sync_from(0, 'x') copies it"
    """

    def __init__(self) -> None:
        # name -> rank -> how the rank ended that had a value; "" while it has one
        self._had: dict[str, dict[int, str]] = {}
        self._imports: dict[str, tuple[str, ...]] = {}
        self._missing: dict[int, list[str]] = {}  # rank -> statements that it has to repeat

    def begin(self, rank: int, statements: Statements, names: Iterable[str]) -> list[str]:
        """A cell with these imports begins on a rank, and binds `names` otherwise; gives the
        imports of earlier cells that the rank has to repeat before, if it is new."""
        # Removed first: what is imported again stands last, as the order of imports may matter.
        for name in (*statements, *names):
            self._imports.pop(name, None)
        self._imports.update(statements)
        return self._missing.pop(rank, [])

    def lose(self, rank: int, why: str) -> None:
        """A rank has been replaced: `why` says it, as in "was killed by SIGKILL"."""
        self._missing[rank] = [line for lines in list(self._imports.values()) for line in lines]
        for had in list(self._had.values()):
            # The first reason stays: a rank that dies again without the value loses nothing.
            if had.get(rank) == "":
                had[rank] = why

    def note(self, name: str, infos: Mapping[int, object]) -> None:
        """What ranks have by a name now; None stands for nothing."""
        had = self._had.setdefault(name, {})
        for rank, info in infos.items():
            if info is not None:
                had[rank] = ""
            elif had.get(rank) == "":
                del had[rank]

    def end(self, name: str) -> None:
        """The name is bound anew: what was lost is not wanted any more."""
        self._had.pop(name, None)

    def of(self, name: str) -> Mapping[int, str]:
        """The ranks whose values are lost, and how those ranks ended."""
        return {rank: why for rank, why in self._had.get(name, {}).items() if why}

    def sentence(self, name: str) -> str:
        """Says with which ranks values were lost, and what to do; "" if none was."""
        lost = self.of(name)
        if not lost:
            return ""
        ended = ", ".join(f"rank {rank}, which {why}" for rank, why in sorted(lost.items()))
        source = min(self._had[name].keys() - lost.keys(), default=None)
        way_on = f"pool.sync_from({source}, {name!r}) copies it"
        if source is None:
            way_on = "no other rank has it"
        return f"{name} was lost with {ended}; {way_on}"

    def hint(self, rank: int, evalue: str) -> str:
        """What to add to a rank's error that says of a lost name that it means nothing, else ""."""
        found = _MISSING.search(evalue)
        name = (found[1] or found[2]) if found else ""
        return f" ({self.sentence(name)})" if rank in self.of(name) else ""
