"""Which values of the notebook the ranks have, and whether these are the same. On the client.

A value is packed each time a cell reads it, which takes as long as reading its memory once (8 ms
for 256 MiB), and sent only if its digest is new. Nothing here talks to a rank.
"""

from __future__ import annotations

import itertools
import pickle
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpupool.core.errors import PoolError
from gpupool.core.progress import Progress
from gpupool.core.wire.pickles import INLINE_BYTES, WHOLE, MemoryFile, Packed, Source, part, to_wire
from gpupool.pool.variables.composite import Constant, key_of
from gpupool.pool.variables.value_pickler import MAX_VALUE_BYTES, FindPart, KeyOf, NotebookPacker

# Objects of their own: None is a value that can be sent.
_GONE: Any = object()  # the placeholder of a value that the notebook has released
_UNBOUND: Any = object()
# Compared by exact type: a subclass may have attributes that change.
_IMMUTABLE = {int, float, complex, bool, str, bytes, type(None)}


@dataclass(slots=True)
class Parcel:
    """A value that was or will be sent. Its `value()` is `_GONE` when the notebook has released it.

    `needs` are the numbers of the earlier parcels that it refers to.
    """

    number: int
    digest: bytes
    value: Callable[[], object]
    needs: frozenset[int]
    names_read: frozenset[str]
    names_bound: frozenset[str]
    filenames: frozenset[str]
    plain: bool
    runs_notebook: bool
    file: MemoryFile | None = None  # of a constant: for ranks that come later
    wire: Packed | None = None


@dataclass(slots=True)
class Shipment:
    """What a cell needs on the ranks.

    `numbers` maps names to parcels, in the order in which these can be read, `aliases` names to
    (name, path) on the rank; `modules` are those to import, `bound` names that the notebook's
    functions bind. `covered` are the notebook's names that mean something else in a cell,
    `problems` names that cannot be sent with the reason, `inline` the parcels that go with the
    cell: rank -> (number, parcel). `left_out` are names that are not sent, with the reason, `later`
    says what the code that the cell makes will read. `filenames` are those of code that goes along,
    `files` have to stay open until the cell has begun.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    aliases: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    bound: set[str] = field(default_factory=set)
    covered: set[str] = field(default_factory=set)
    problems: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    later: dict[str, frozenset[str]] = field(default_factory=dict)
    filenames: set[str] = field(default_factory=set)
    files: list[MemoryFile] = field(default_factory=list)
    inline: dict[int, list[tuple[int, Packed]]] = field(default_factory=dict)


class Parcels:
    """The parcels of a pool. `begin` starts a round, in which nothing in the notebook changes."""

    def __init__(
        self, key_of: KeyOf = key_of, is_ours: Callable[[Constant], bool] = lambda constant: True
    ) -> None:
        self._key_of = key_of
        self._is_ours = is_ours
        self._numbers = itertools.count(1)
        self._parcels: dict[int, Parcel] = {}
        self._by_name: dict[str, int] = {}
        self._by_value: dict[int, int] = {}  # id of a value -> its parcel, if it is still that one
        self._parts: dict[int, tuple[weakref.ref[Any], int, int]] = {}  # id -> of whom, which
        self._checked: dict[int, bool] = {}  # in this round: whether it is what was sent
        self._packed: dict[int, NotebookPacker] = {}  # in this round
        self._dropped: list[int] = []

    def begin(self, names: Mapping[str, object]) -> list[int]:
        """Start a round: release what `names`, the notebook's, do not mean any more.

        Returns:
            The numbers of the parcels that the ranks may forget.
        """
        self.end()
        self._checked.clear()
        # By identity: an equal object may be another one, which others change later.
        live = {
            number
            for name, number in self._by_name.items()
            if names.get(name, _UNBOUND) is self._parcels[number].value()
        }
        live |= {number for number, parcel in self._parcels.items() if parcel.file is not None}
        # One that a living parcel refers to stays, whatever its own name means by now.
        for number in set(self._parcels) - self.with_needs(live):
            self.drop(number)
        dropped, self._dropped = self._dropped, []
        return dropped

    def end(self) -> None:
        """Release the packed data: arrays of the notebook are locked while it is there."""
        self._packed.clear()

    def parcel(self, name: str, value: object) -> Parcel:
        """The parcel of a value that `name` has in the notebook: a new one if it has changed.

        Raises:
            Exception: whatever its class raises when it cannot be pickled.
        """
        known = self._known(name, value)
        # Anything else may have been changed in place: only its digest can say.
        if known is None or not (type(value) in _IMMUTABLE or self._is_current(known.number)):
            known = self._new(value, MAX_VALUE_BYTES)
        self._by_name[name] = known.number
        return known

    def constant(self, value: object, bar: Progress | None = None) -> Parcel:
        """A parcel that stays what it is, of any size, until it is dropped.

        `bar` counts the bytes that are where the ranks read them.
        """
        # Without a limit: the user has asked for it, once, with a bar.
        parcel = self._new(value, None)
        parcel.file = MemoryFile()
        packer = self._packed[parcel.number]
        bar = bar or Progress("")
        bar.update(0, packer.num_bytes)
        parcel.wire = to_wire(packer.stream(), packer.buffers, parcel.file, bar.advance)
        return parcel

    def number_of(self, constant: Constant) -> int:
        """The parcel of a constant.

        Raises:
            PoolError: it is not one of this pool's.
        """
        if not self._is_ours(constant) or constant.number not in self._parcels:
            raise PoolError(
                "it is a Constant of another pool, whose ranks had the value; `pool.put` brings "
                "the value to the ranks of this one.",
                "other pool",
            )
        return constant.number

    def load(self, number: int) -> Any:
        """The value of a constant, as a rank reads it.

        Raises:
            PoolError: it refers to what only the ranks have.
        """
        parcel = self._parcels[number]
        assert parcel.wire is not None

        ours = {"part": self._part, "rank_value": _of_ranks}

        class Reader(pickle.Unpickler):
            def find_class(self, module: str, name: str) -> Any:
                found = ours.get(name) if module == part.__module__ else None
                return found or super().find_class(module, name)

        return Source(parcel.wire).load(Reader)[0]

    def pack_once(self, value: object) -> NotebookPacker:
        """Pack a value that is used once; it may refer to all that the ranks have."""
        return self._pack(value, next(self._numbers), None)

    def gone(self) -> list[int]:
        """The parcels whose values the notebook does not have any more: none can be sent again."""
        return [n for n, p in self._parcels.items() if p.file is None and p.value() is _GONE]

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

    def in_order(self, names: Mapping[str, int], needs: Iterable[int] = ()) -> list[int]:
        """The parcels of `names`, `needs`, and all that they refer to: as they are to be read.

        What runs methods of the notebook's classes comes last, and after what these read by name.
        """
        runs: dict[int, bool] = {}  # in the order in which all below a parcel comes before it
        seen: set[int] = set()
        stack = [(number, False) for number in (*needs, *names.values())][::-1]
        while stack:
            number, is_below_done = stack.pop()
            parcel = self._parcels[number]
            if is_below_done:
                runs[number] = parcel.runs_notebook or any(runs.get(n, True) for n in parcel.needs)
            elif number not in seen:
                seen.add(number)
                read = [names[name] for name in sorted(parcel.names_read & names.keys())]
                stack.append((number, True))
                stack += [(n, False) for n in (*read, *sorted(parcel.needs, reverse=True))]
        return sorted(runs, key=runs.__getitem__)

    def num_bytes(self, number: int) -> int:
        """How many bytes of a parcel this round has packed; 0 of one that was packed before."""
        packer = self._packed.get(number)
        return packer.num_bytes if packer is not None else 0

    def wire(
        self, number: int, advance: Callable[[int], None] = lambda num_bytes: None
    ) -> tuple[Packed, MemoryFile | None]:
        """A parcel as it travels, and what has to be kept open until it has arrived.

        `advance` as in `to_wire`.
        """
        parcel = self._parcels[number]
        if parcel.wire is not None:
            return parcel.wire, None
        packer = self._packed.get(number)
        if packer is None:  # what cannot change is not packed to be compared
            packer = self._pack(parcel.value(), number, MAX_VALUE_BYTES)
        file = MemoryFile() if packer.num_bytes > INLINE_BYTES else None
        return to_wire(packer.stream(), packer.buffers, file, advance), file

    def is_plain(self, number: int) -> bool:
        """Whether a rank can unpickle it without running code of anybody's."""
        return self._parcels[number].plain

    def filenames(self, numbers: Iterable[int]) -> set[str]:
        """Where the functions in these parcels were compiled."""
        return {name for number in numbers for name in self._parcels[number].filenames}

    def drop(self, number: int) -> None:
        """Forget a parcel, and those that refer to it."""
        parcel = self._parcels.pop(number, None)
        if parcel is None:
            return
        self._dropped.append(number)
        self._checked[number] = False  # who asks again in this round must not count on it
        if parcel.file is not None:
            parcel.file.close()
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
            if parcel is not None and parcel.file is None and parcel.value() is value:
                return parcel
        return None

    def _part(self, number: int, index: int) -> Any:
        """An object of an earlier parcel, while the notebook has it."""
        if index == WHOLE:
            return self.load(number)
        for reference, other, place in self._parts.values():
            if (other, place) == (number, index) and reference() is not None:
                return reference()
        return _of_ranks()

    def _new(self, value: object, max_bytes: int | None) -> Parcel:
        number = next(self._numbers)
        packer = self._pack(value, number, max_bytes)
        parcel = Parcel(
            number,
            packer.digest,
            _weakly(value),
            frozenset(packer.needs),
            frozenset(packer.names_read),
            frozenset(packer.names_bound),
            frozenset(packer.filenames),
            packer.plain,
            packer.runs_notebook,
        )
        self._parcels[number] = parcel
        self._by_value[id(value)] = number
        self._packed[number] = packer
        self._checked[number] = True
        # By id, with a weak reference to check it: ids are used again.
        for index, one in enumerate(packer.parts):
            self._parts[id(one)] = weakref.ref(one), number, index
        return parcel

    def _pack(self, value: object, number: int, max_bytes: int | None) -> NotebookPacker:
        return NotebookPacker(value, self._find_part(number), self._key_of, max_bytes)

    def _is_current(self, number: int) -> bool:
        """Whether the ranks have it as it is now; drops it if not."""
        if number not in self._checked:
            parcel = self._parcels[number]
            value = parcel.value()
            self._checked[number] = True  # before it is packed: it may refer to itself
            if value is not _GONE and parcel.file is None:
                packer = self._pack(value, number, MAX_VALUE_BYTES)
                if packer.digest == parcel.digest and number in self._parcels:
                    self._packed[number] = packer
                else:
                    self.drop(number)
        return self._checked[number]

    def _find_part(self, before: int) -> FindPart:
        """Looks in parcels older than `before` alone: so none can refer to another in a circle."""

        def find(obj: object) -> tuple[int, int] | None:
            if isinstance(obj, Constant):
                return self.number_of(obj), WHOLE
            reference, number, index = self._parts.get(id(obj), (None, 0, 0))
            if reference is None or reference() is not obj or number >= before:
                return None
            return (number, index) if self._is_current(number) else None

        return find


def _of_ranks(*_: object) -> Any:
    raise PoolError(
        "this Constant refers to values that the notebook has released and only the ranks have: "
        "put it again, with all that it is made of.",
        "no value",
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
