"""Which values of the notebook the ranks have, and whether these are the same. On the client.

A value is packed each time a cell reads it, which takes as long as reading its memory once (8 ms
for 256 MiB), and sent only if its digest is new. Nothing here talks to a rank.
"""

from __future__ import annotations

import itertools
import linecache
import pickle
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpupool.core.errors import PoolError
from gpupool.core.wire.pickles import WHOLE, Packed, Source, part
from gpupool.core.wire.values import Sources
from gpupool.pool.variables.buffers import Buffers, Key, Stored
from gpupool.pool.variables.composite import Constant, key_of
from gpupool.pool.variables.value_pickler import (
    MAX_VALUE_BYTES,
    FindPart,
    KeyOf,
    NotebookPacker,
    packed,
)

# Objects of their own: None is a value that can be sent.
_GONE: Any = object()  # the placeholder of a value that the notebook has released
_UNBOUND: Any = object()
# Compared by exact type: a subclass may have attributes that change.
_IMMUTABLE = {int, float, complex, bool, str, bytes, type(None)}


@dataclass(slots=True)
class Parcel:
    """A value that was or will be sent. Its `value()` is `_GONE` when the notebook has released it.

    `keys` say what is in it, `needs` are the numbers of the earlier parcels that it refers to,
    `sources` the text of the cells whose code it has. `contents` keep what is beside the message.
    """

    number: int
    value: Callable[[], object]
    keys: Sequence[Key]
    needs: frozenset[int]
    names_read: frozenset[str]
    names_bound: frozenset[str]
    plain: bool
    sources: Sources
    wire: Packed
    contents: Sequence[Stored | None]
    is_constant: bool = False

    @property
    def goes_along(self) -> bool:
        """Whether it is small, and ranks can unpickle it without running code of anybody's."""
        return self.plain and not self.contents


@dataclass(slots=True)
class Shipment:
    """What a cell needs on the ranks.

    `numbers` maps names to parcels, `aliases` names to (name, path) on the rank; `modules` are
    those to import, `bound` names that the notebook's functions bind. `covered` are the notebook's
    names that mean something else in a cell, `problems` names that cannot be sent with the reason.
    `left_out` are names that are not sent, with the reason, `later` says what the code that the
    cell makes will read. `along` are the parcels that go with the cell, by rank: they have to be
    kept until it has begun.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    aliases: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    bound: set[str] = field(default_factory=set)
    covered: set[str] = field(default_factory=set)
    problems: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    later: dict[str, frozenset[str]] = field(default_factory=dict)
    along: dict[int, list[Parcel]] = field(default_factory=dict)


class Parcels:
    """The parcels of a pool. `begin` starts a round, in which nothing in the notebook changes."""

    def __init__(
        self,
        buffers: Buffers,
        key_of: KeyOf = key_of,
        is_ours: Callable[[Constant], bool] = lambda constant: True,
    ) -> None:
        self._buffers = buffers
        self._key_of = key_of
        self._is_ours = is_ours
        self._numbers = itertools.count(1)
        self._parcels: dict[int, Parcel] = {}
        self._by_name: dict[str, int] = {}
        self._by_value: dict[int, int] = {}  # id of a value -> its parcel, if it is still that one
        self._parts: dict[int, tuple[weakref.ref[Any], int, int]] = {}  # id -> of whom, which
        self._opened: dict[int, tuple[int, Any]] = {}  # id of what `open` gave -> number, and that
        self._checked: dict[int, bool] = {}  # in this round: whether it is what was sent

    def begin(self, names: Mapping[str, object]) -> None:
        """Start a round: release what `names`, the notebook's, do not mean any more."""
        self._checked.clear()
        # By identity: an equal object may be another one, which others change later.
        live = {
            number
            for name, number in self._by_name.items()
            if names.get(name, _UNBOUND) is self._parcels[number].value()
        }
        live |= {number for number, parcel in self._parcels.items() if parcel.is_constant}
        # One that a living parcel refers to stays, whatever its own name means by now.
        for number in set(self._parcels) - self.with_needs(live):
            self.drop(number)

    def alive(self) -> list[int]:
        """The parcels that ranks have to keep."""
        return list(self._parcels)

    def __getitem__(self, number: int) -> Parcel:
        return self._parcels[number]

    def parcel(self, name: str, value: object) -> Parcel:
        """The parcel of a value that `name` has in the notebook: a new one if it has changed.

        Raises:
            Exception: whatever its class raises when it cannot be pickled.
        """
        known = self._known(name, value)
        # Anything else may have been changed in place: only its digest can say.
        if known is None or not (type(value) in _IMMUTABLE or self._is_current(known.number)):
            known = self._new(value, name, MAX_VALUE_BYTES)
        self._by_name[name] = known.number
        return known

    def constant(self, value: object) -> Parcel:
        """A parcel that stays what it is, of any size, until it is dropped."""
        # Without a limit: the user has asked for it, once, with a bar.
        parcel = self._new(value, f"a value ({type(value).__name__})", None)
        parcel.is_constant = True
        return parcel

    def parcel_of(self, value: object) -> int | None:
        """The number of a constant's parcel, or of what `open` gave for one; None of any other.

        Raises:
            PoolError: it is a constant of another pool.
        """
        if not isinstance(value, Constant):
            return self._opened[id(value)][0] if id(value) in self._opened else None
        if not self._is_ours(value) or value.number not in self._parcels:
            raise PoolError(
                "it is a Constant of another pool, whose ranks had the value; `pool.put` brings "
                "the value to the ranks of this one."
            )
        return value.number

    def open(self, number: int) -> Any:
        """The value of a constant for the notebook, in the memory that ranks map: always the same.

        Raises:
            PoolError: it refers to what only the ranks have.
        """
        for opened, value in self._opened.values():
            if opened == number:
                return value
        ours = {"part": self._part, "rank_value": _of_ranks}

        class Reader(pickle.Unpickler):
            def find_class(self, module: str, name: str) -> Any:
                found = ours.get(name) if module == part.__module__ else None
                return found or super().find_class(module, name)

        value = Source(self._parcels[number].wire).load(Reader)[0]
        self._opened[id(value)] = number, value
        return value

    def once(self, value: object) -> Parcel:
        """A parcel that is used once; it may refer to all that the ranks have."""
        number = next(self._numbers)
        return self._made(value, number, self._pack(value, number, None), "the arguments")

    def with_needs(self, numbers: Iterable[int]) -> set[int]:
        """These parcels and all that they refer to, and so on."""
        found: set[int] = set()
        queue = list(numbers)
        while queue:
            number = queue.pop()
            if number not in found:
                found.add(number)
                queue += self._parcels[number].needs
        return found

    def names_in(self, number: int) -> tuple[frozenset[str], frozenset[str]]:
        """The names that a parcel, and what it refers to, reads and binds."""
        parcels = [self._parcels[n] for n in self.with_needs([number])]
        none = frozenset[str]()
        return (
            none.union(*(parcel.names_read for parcel in parcels)),
            none.union(*(parcel.names_bound for parcel in parcels)),
        )

    def drop(self, number: int) -> None:
        """Forget a parcel, and those that refer to it."""
        if self._parcels.pop(number, None) is None:
            return
        self._checked[number] = False  # who asks again in this round must not count on it
        for key in [key for key, (other, _) in self._opened.items() if other == number]:
            del self._opened[key]
        for name in [name for name, other in self._by_name.items() if other == number]:
            del self._by_name[name]
        for key in [key for key, other in self._by_value.items() if other == number]:
            del self._by_value[key]
        for key in [key for key, (_, other, _) in self._parts.items() if other == number]:
            del self._parts[key]
        # They refer to parts that a rank could not find any more.
        for other in [n for n, p in self._parcels.items() if number in p.needs]:
            self.drop(other)

    def _known(self, name: str, value: object) -> Parcel | None:
        """The parcel of this very object, by this name or another one."""
        for number in (self._by_name.get(name, 0), self._by_value.get(id(value), 0)):
            parcel = self._parcels.get(number)
            # `is`, as ids are used again. A constant keeps its number, and stands for no name.
            if parcel is not None and not parcel.is_constant and parcel.value() is value:
                return parcel
        return None

    def _part(self, number: int, index: int) -> Any:
        """An object of an earlier parcel, while the notebook has it."""
        if index == WHOLE:
            return self.open(number)
        for reference, other, place in self._parts.values():
            if (other, place) == (number, index) and reference() is not None:
                return reference()
        return _of_ranks()

    def _new(self, value: object, what: str, max_bytes: int | None) -> Parcel:
        number = next(self._numbers)
        packer = self._pack(value, number, max_bytes)
        parcel = self._parcels[number] = self._made(value, number, packer, what)
        self._by_value[id(value)] = number
        self._checked[number] = True
        # By id, with a weak reference to check it: ids are used again.
        for index, one in enumerate(packer.parts):
            self._parts[id(one)] = weakref.ref(one), number, index
        return parcel

    def _made(self, value: object, number: int, packer: NotebookPacker, what: str) -> Parcel:
        wire, contents = self._buffers.pack(packer, what, packer.keys)
        return Parcel(
            number,
            _weakly(value),
            packer.keys,
            frozenset(packer.needs),
            frozenset(packer.names_read),
            frozenset(packer.names_bound),
            packer.plain,
            sources_of(packer.filenames),
            wire,
            contents,
        )

    def _pack(self, value: object, number: int, max_bytes: int | None) -> NotebookPacker:
        return packed(value, self._find_part(number), self._key_of, max_bytes)

    def _is_current(self, number: int) -> bool:
        """Whether the ranks have it as it is now; drops it if not."""
        if number not in self._checked:
            parcel = self._parcels[number]
            value = parcel.value()
            self._checked[number] = True  # before it is packed: it may refer to itself
            if value is not _GONE and not parcel.is_constant:
                packer = self._pack(value, number, MAX_VALUE_BYTES)
                if packer.keys != parcel.keys or number not in self._parcels:
                    self.drop(number)
        return self._checked[number]

    def _find_part(self, before: int) -> FindPart:
        """Looks in parcels older than `before` alone: so none can refer to another in a circle."""

        def find(obj: object) -> tuple[int, int] | None:
            if isinstance(obj, Constant):
                number = self.parcel_of(obj)
                assert number is not None
                return number, WHOLE
            reference, number, index = self._parts.get(id(obj), (None, 0, 0))
            if reference is None or reference() is not obj or number >= before:
                return None
            return (number, index) if self._is_current(number) else None

        return find


def sources_of(filenames: Iterable[str]) -> Sources:
    """The text of the cells among these files; tracebacks of a rank show lines of it.

    Args:
        filenames: `co_filename` of the code that travels; files on disk are left out.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # IPython's private map from file name to number of the cell; `linecache` has the text.
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return {
        name: (numbers[name], "".join(linecache.getlines(name)))
        for name in set(filenames) & set(numbers)
    }


def _of_ranks(*_: object) -> Any:
    raise PoolError(
        "this Constant refers to values that the notebook has released and only the ranks have: "
        "put it again, with all that it is made of."
    )


def _weakly(value: object) -> Callable[[], object]:
    """The value, as long as others have it too; what cannot be watched is kept."""
    try:
        reference = weakref.ref(value)
    # int, list and dict among them: they live until `begin` sees that their name means another.
    except TypeError:
        return lambda: value

    def alive() -> object:
        found = reference()
        return _GONE if found is None else found

    return alive
