"""What names mean on the ranks, as far as the notebook has made them mean it. On the client."""

from __future__ import annotations

import keyword
import sys

from gpupool.core.errors import PoolError
from gpupool.core.wire.global_names import RANK_NAMES

_SHELL_NAMES = frozenset({"_", "_i", "_ii", "_iii", "_oh", "_ih", "_dh", "In", "Out"})


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
    """Refuse a name that the notebook cannot give to a value on the ranks.

    Raises:
        PoolError: says why.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise PoolError(f"{name!r} is no name of a variable.")
    if name in RANK_NAMES or is_hidden(name):
        raise PoolError(f"{name} is the rank's own: choose another name.")


class Versions:
    """Counts how often each name has been bound on the ranks, by a cell or for one.

    A handle of an earlier version means a value that is not there any more.
    """

    def __init__(self) -> None:
        self._bound: dict[str, tuple[int, object]] = {}

    def of(self, name: str) -> int:
        """The version of what the ranks have under a name now."""
        return self._bound.get(name, (0, None))[0]

    def bind(self, name: str, meaning: object = None) -> int:
        """The name is bound, by a cell or for one to this `meaning`; gives the version of that.

        The same meaning again binds nothing new, so handles of the name stay good.
        """
        is_new = meaning is None or self._bound.get(name, (0, None))[1] != meaning
        self._bound[name] = self.of(name) + is_new, meaning
        return self.of(name)
