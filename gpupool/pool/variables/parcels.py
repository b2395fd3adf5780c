"""Which values of the notebook the ranks have, and whether these are the same. On the client.

A value is packed each time a cell reads it, which takes as long as reading its memory once (8 ms
for 256 MiB), and sent only if its digest is new. An object that the ranks have already, as a part
of a value that was sent earlier, is not packed again but referred to: an optimizer finds the
parameters of the very model that a rank has. Nothing here talks to a rank.
"""

from __future__ import annotations

import itertools
import linecache
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from gpupool.core.errors import PoolError
from gpupool.core.wire.global_names import names_in_code
from gpupool.core.wire.pickles import (
    WHOLE,
    Packed,
    Packer,
    Source,
    TooLargeError,
    namespace,
    part,
    rank_value,
    why_not,
)
from gpupool.core.wire.reductions import with_imports_by_name
from gpupool.core.wire.values import Place, Sources
from gpupool.pool.environment.environment import notebook_place
from gpupool.pool.variables.buffers import Buffers, Digest, Stored, keys_of
from gpupool.pool.variables.composite import Composite, Constant, Key, key_of
from gpupool.pool.variables.names import is_hidden

MAX_VALUE_BYTES = 256 << 20

_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, CodeType, CellType)
# An object of its own: None is a value that can be sent.
_GONE: Any = object()
# Compared by exact type: a subclass may have attributes that change.
_IMMUTABLE = {int, float, complex, bool, str, bytes, type(None)}

_numbers = itertools.count(1)  # of all pools: a `Constant` of another one is in no other's


class NotebookPacker(Packer):
    """Pickles (value, parts): `parts` are the objects in it that others may refer to later.

    `names_read` are the global names that its functions read and by which its classes are found,
    `names_bound` those that they bind; `needs` the parcels it refers to. `plain` says that it is
    numbers and texts, and containers of them: to unpickle it cannot fail.
    """

    def __init__(self, value: object, parcels: Parcels, before: int, max_bytes: int | None) -> None:
        super().__init__(max_bytes)
        self._parcels, self._before = parcels, before
        self.parts: list[object] = []
        self.names_read, self.names_bound, self.needs = set[str](), set[str](), set[int]()
        self.plain = True
        # pickle walks in order: all parts are found when it comes to their list
        self.dump((value, self.parts))
        self.keys = keys_of(self)

    def reducer_override(self, obj: Any) -> Any:
        self.plain = False  # pickle asks about all others
        if isinstance(obj, Composite):
            return rank_value, self._parcels.current(obj)
        if isinstance(obj, FunctionType) and obj.__globals__ is namespace():
            reads, binds = names_in_code(obj.__code__)
            self.names_read |= reads
            self.names_bound |= binds
            return super().reducer_override(obj)
        if isinstance(obj, Constant) or _is_part(obj):
            known = self._parcels.part_of(obj, self._before)
            if known is not None:
                self.needs.add(known[0])
                return part, known
            self.parts.append(obj)
        elif isinstance(obj, type) and obj.__module__ == "__main__":
            # by this name a rank's pickle looks for the class
            self.names_read.add(obj.__qualname__.partition(".")[0])
        return super().reducer_override(obj)


def _is_part(obj: object) -> bool:
    """Whether others may refer to it: a thing with an identity that can be watched."""
    # 0 for types whose objects no weak reference can watch, such as int and list.
    if not type(obj).__weakrefoffset__ or isinstance(obj, _CODE):
        return False
    torch = sys.modules.get("torch")
    return torch is None or not isinstance(obj, (torch.storage.TypedStorage, torch.UntypedStorage))


@dataclass(slots=True, weakref_slot=True)
class Parcel:
    """A value that was or will be sent.

    `contents` keep what is beside the message. One that `goes_along` with a cell is small, and to
    unpickle it cannot fail. `value()` is what the notebook has, or the Constant that stands for it,
    or `_GONE` when it was released; `opened` is what the notebook has mapped of a constant.
    """

    number: int
    keys: Sequence[Digest]
    needs: set[int]
    names_read: set[str]
    names_bound: set[str]
    sources: Sources
    wire: Packed
    contents: Sequence[Stored | None]
    goes_along: bool
    value: Callable[[], object] = lambda: _GONE
    opened: Any = None


@dataclass(slots=True)
class Shipment:
    """What a cell needs on the ranks.

    `numbers` maps names to parcels, `aliases` names to (name, path) on the rank; `parcels` are all
    that these need, to be kept until it has begun. `modules` are to be imported; `bound` are names
    that the notebook's functions bind, `left_out` those that are not sent, with the reason, `later`
    those that code which the cell makes may read. `along` are the parcels that go with the cell.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    aliases: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    parcels: Sequence[Parcel] = ()
    modules: set[str] = field(default_factory=set)
    bound: set[str] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)
    later: set[str] = field(default_factory=set)
    along: dict[int, list[Parcel]] = field(default_factory=dict)
    place: Place = field(default_factory=notebook_place)


KeptCall = tuple[Parcel, Shipment]
"""A (function, args, kwargs) for ranks, and what it needs there."""


class Parcels:
    """The parcels of a pool. `begin` starts a round, in which nothing in the notebook changes.

    All that is given a constant of another pool raises a PoolError.
    """

    def __init__(self, buffers: Buffers, current: Callable[[Composite], Key] = key_of) -> None:
        self._buffers = buffers
        self.current = current
        self.by_number: dict[int, Parcel] = {}
        # Those too that somebody has who runs, or will run.
        self.alive = weakref.WeakValueDictionary[int, Parcel]()
        # By id, which is used again: what is found is compared with what it is to be.
        self._by_value: dict[int, int] = {}
        self._parts: dict[int, tuple[weakref.ref[Any], int, int]] = {}  # of whom, which
        self._checked: set[int] = set()  # in this round

    def begin(self, names: Mapping[str, object]) -> None:
        """Start a round: release what `names`, the notebook's, do not mean any more."""
        self._checked.clear()
        # By identity: an equal object may be another one, which others change later.
        meant = {id(value) for name, value in names.items() if not is_hidden(name)}
        live = [
            number
            for number, parcel in self.by_number.items()
            if isinstance(value := parcel.value(), Constant) or id(value) in meant
        ]
        # One that a living parcel refers to stays, whatever its own name means by now.
        self.by_number = there = {one.number: one for one in self.with_needs(live)}
        self._by_value = {key: n for key, n in self._by_value.items() if n in there}
        self._parts = {key: found for key, found in self._parts.items() if found[1] in there}

    def parcel(self, name: str, value: object) -> Parcel:
        """The parcel of a value that `name` has in the notebook: a new one if it has changed.

        It raises whatever the value's class does when it cannot be pickled.
        """
        if isinstance(value, Constant):
            return self.by_number[self._number_of(value)]
        number = self._by_value.get(id(value), 0)
        known = self.by_number.get(number)
        is_same = known is not None and known.value() is value
        # What else there is may have been changed in place: only its digest can say.
        if is_same and (type(value) in _IMMUTABLE or self._is_current(number)):
            return self.by_number[number]
        made, parts = self._made(value, name, MAX_VALUE_BYTES)
        made.value = _weakly(value)
        self.by_number[made.number] = made
        self._by_value[id(value)] = made.number
        self._checked.add(made.number)
        for index, one in enumerate(parts):
            self._parts[id(one)] = weakref.ref(one), made.number, index
        return made

    def why_not(self, error: Exception, name: str, value: object) -> str:
        """In words, why there is no parcel of a value; what to do, where it is too large."""
        if not isinstance(error, TooLargeError):
            return why_not(error, value, name, lambda part: self._pack(part, 0, MAX_VALUE_BYTES))
        torch = sys.modules.get("torch")
        if torch and isinstance(value, torch.Tensor) and value.nbytes < MAX_VALUE_BYTES:
            return (
                f"it is a view of a tensor of {error.num_bytes >> 20} MiB or more, and a cell "
                f"sends up to {MAX_VALUE_BYTES >> 20} MiB. Send a copy: `{name} = {name}.clone()`."
            )
        return (
            f"it takes {error.num_bytes / 2**20:.0f} MiB or more; a cell sends up to "
            f"{MAX_VALUE_BYTES >> 20} MiB. Load it in the cell, or bring it to the ranks once: "
            f"`{name} = pool.put({name})`."
        )

    def constant(self, value: object, variables: Any) -> Constant:
        """What stands for a parcel of any size, which stays what it is for as long as this lives.

        It has no part in common with what cells read: that changes.
        """
        kind = type(value).__name__
        parcel, _ = self._made(value, f"a value ({kind})", None, before=0)
        constant = Constant(variables, parcel.number, kind)
        parcel.value = _weakly(constant)
        self.by_number[parcel.number] = parcel
        return constant

    def once(self, value: object) -> Parcel:
        """A parcel that is used once; it may refer to all that the ranks have."""
        return self._made(value, "the arguments", None)[0]

    def part_of(self, obj: object, before: int) -> tuple[int, int] | None:
        """The parcel, older than `before`, and the part of it, that the ranks have an object by."""
        if isinstance(obj, Constant):
            return self._number_of(obj), WHOLE
        reference, number, index = self._parts.get(id(obj), (None, 0, 0))
        if reference is None or reference() is not obj or number >= before:
            return None
        return (number, index) if self._is_current(number) else None

    def parcel_of(self, value: object) -> int | None:
        """The number of a constant's parcel, or of what `open` gave for one; None of any other."""
        if isinstance(value, Constant):
            return self._number_of(value)
        found = self.by_number.get(self._by_value.get(id(value), 0))
        return found.number if found is not None and found.opened is value else None

    def open(self, constant: Constant) -> Any:
        """A constant's value for the notebook, in the memory that ranks map: always the same."""
        parcel = self.by_number[self._number_of(constant)]
        if parcel.opened is None:
            parcel.opened, _ = Source(parcel.wire).load()
            self._by_value[id(parcel.opened)] = parcel.number
        return parcel.opened

    def with_needs(self, numbers: Iterable[int]) -> list[Parcel]:
        """These parcels and all that they refer to, the oldest first."""
        found: dict[int, Parcel] = {}
        queue = list(numbers)
        while queue:
            number = queue.pop()
            if number not in found:
                found[number] = self.by_number[number]
                queue += found[number].needs
        return [found[number] for number in sorted(found)]

    def names_in(self, *numbers: int) -> tuple[set[str], set[str]]:
        """The names that parcels, and what they refer to, read and bind."""
        reads, binds = set[str](), set[str]()
        for one in self.with_needs(numbers):
            reads |= one.names_read
            binds |= one.names_bound
        return reads, binds

    def drop(self, number: int) -> None:
        """Forget a parcel, and those that refer to it: a rank could not find the parts any more."""
        if self.by_number.pop(number, None) is not None:
            for other in [n for n, parcel in self.by_number.items() if number in parcel.needs]:
                self.drop(other)

    def _made(
        self, value: object, what: str, max_bytes: int | None, before: int = sys.maxsize
    ) -> tuple[Parcel, list[object]]:
        """A new parcel, which refers to none of `before` or later, and the value's parts."""
        packer = self._pack(value, before, max_bytes)
        wire, contents = self._buffers.pack(packer, what, packer.keys)
        parcel = Parcel(
            next(_numbers),
            packer.keys,
            packer.needs,
            packer.names_read,
            packer.names_bound,
            sources_of(packer.filenames),
            wire,
            contents,
            goes_along=packer.plain and not contents,
        )
        self.alive[parcel.number] = parcel
        return parcel, packer.parts

    def _pack(self, value: object, before: int, max_bytes: int | None) -> NotebookPacker:
        # by what it is or, where it must, by the name an import gives it
        return with_imports_by_name(lambda: NotebookPacker(value, self, before, max_bytes))

    def _is_current(self, number: int) -> bool:
        """Whether the ranks have it as it is now; drops it if not."""
        parcel = self.by_number.get(number)
        if parcel is not None and number not in self._checked:
            self._checked.add(number)  # before it is packed: it may refer to itself
            value = parcel.value()
            again = None if value is _GONE else self._pack(value, number, MAX_VALUE_BYTES)
            if again is not None and again.keys != parcel.keys:
                self.drop(number)
        return number in self.by_number

    def _number_of(self, constant: Constant) -> int:
        if constant.number not in self.by_number:
            raise PoolError(
                "it is a Constant of another pool, whose ranks had the value; `pool.put` brings "
                "the value to the ranks of this one."
            )
        return constant.number


def sources_of(filenames: Iterable[str]) -> Sources:
    """The text of the cells among these files, of which tracebacks of a rank show lines."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # IPython's private map from file name to number of the cell; `linecache` has the text.
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return {
        name: (numbers[name], "".join(linecache.getlines(name)))
        for name in set(filenames) & set(numbers)
    }


def _weakly(value: object) -> Callable[[], object]:
    """The value, as long as others have it too; what cannot be watched is kept."""
    try:
        reference = weakref.ref(value)
    # int, list and dict among them: they live until `begin` sees that their name means another.
    except TypeError:
        return lambda: value
    return lambda: _GONE if (found := reference()) is None else found
