"""What names mean on the ranks, as far as the notebook has made them mean it. On the client."""

from __future__ import annotations

import keyword
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from gpupool.core.errors import PoolError
from gpupool.core.wire.global_names import RANK_NAMES

if TYPE_CHECKING:
    from gpupool.pool.variables.parcels import Shipment

_SHELL_NAMES = frozenset({"_", "_i", "_ii", "_iii", "_oh", "_ih", "_dh", "In", "Out"})
# IPython's too, but people give these names to their own things: `from smart_open import open`
_SHELL_FUNCTIONS = frozenset({"exit", "quit", "open", "get_ipython", "display"})


def is_hidden(name: str) -> bool:
    """Whether a name is IPython's or Python's own on each side: _, _12, In, __name__."""
    return (
        name.startswith("__")
        or name in _SHELL_NAMES
        or (name.startswith("_") and name.strip("_").lstrip("i").isdigit())
    )


def is_of_shell(name: str, value: object) -> bool:
    """Whether this is what IPython has put under the name."""
    # By where the value comes from, not by name alone: users bind these names to their own things.
    if name not in _SHELL_FUNCTIONS:
        return False
    of = value if hasattr(value, "__name__") else type(value)
    return (getattr(of, "__module__", None) or "").partition(".")[0] in _OF_SHELL


_OF_SHELL = {"IPython", "ipykernel", "io", "_io", "_sitebuiltins"}


def require_name(name: str) -> None:
    """Refuse a name that the notebook cannot give to a value on the ranks.

    Raises:
        PoolError: says why.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise PoolError(f"{name!r} is no name of a variable.")
    if name in RANK_NAMES or is_hidden(name):
        whose = "the rank's own" if name in RANK_NAMES else "IPython's or Python's own"
        raise PoolError(f"in a cell {name} is {whose}: choose another name for the value.")


class Made(NamedTuple):
    """What a statement of a cell binds: `names` that mean something made of what it `reads`.

    The functions and classes in it read the names `inside` when they are called.
    """

    names: set[str]
    reads: set[str]
    inside: set[str]


class Versions:
    """Counts how often each name has been bound on the ranks, by a cell or for one.

    A handle of an earlier version means a value that is not there any more.
    """

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}
        self._shipped: dict[str, object] = {}  # what a name was last bound to, if for a cell

    def of(self, name: str) -> int:
        """The version of what the ranks have under a name now."""
        return self._versions.get(name, 0)

    def assigned(self, name: str) -> int:
        """A cell binds the name; gives the version of that."""
        self._shipped.pop(name, None)
        self._versions[name] = self.of(name) + 1
        return self._versions[name]

    def shipped(self, shipment: Shipment) -> None:
        """These names are bound for a cell; one that means the same already keeps its version."""
        meanings: Iterable[tuple[str, object]] = (
            *shipment.numbers.items(),
            *shipment.aliases.items(),
        )
        for name, meaning in meanings:
            # The same parcel again binds nothing new, so handles of the name stay good.
            if self._shipped.get(name) != meaning:
                self.assigned(name)
                self._shipped[name] = meaning
