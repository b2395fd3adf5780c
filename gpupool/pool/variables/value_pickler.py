"""Pickle a value of the notebook for the ranks. Runs on the client.

An object that the ranks have already, as a part of a value that was sent earlier, is not pickled
again but referred to: an optimizer finds the parameters of the very model that a rank has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any

from gpupool.core.wire.global_names import names_in_code
from gpupool.core.wire.pickles import (
    NAMESPACE,
    WHOLE,
    Packer,
    TooLargeError,
    namespace,
    part,
    rank_value,
    why_not,
)
from gpupool.core.wire.reductions import NONE_NAMED, Named, with_imports_by_name
from gpupool.pool.variables.buffers import keys_of
from gpupool.pool.variables.composite import Composite, Constant, key_of

MAX_VALUE_BYTES = 256 << 20

# an object of the notebook -> (number of the parcel, of the part in it) that the ranks have it by;
# raises if it is a `Constant` of another pool
FindPart = Callable[[object], tuple[int, int] | None]
# a Composite -> (name, path, version) on the ranks; raises if its values are gone
KeyOf = Callable[[Composite], tuple[str, tuple[str, ...], int]]

_NO_PARTS = (
    type,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    ModuleType,
    CodeType,
    CellType,
)

# What comes from these unpickles without anybody's own code being run.
_SAFE = {*sys.stdlib_module_names, "numpy", "torch", "cloudpickle", "gpupool"}


class NotebookPacker(Packer):
    """Pickles (value, parts): `parts` are the objects in it that others may refer to later.

    Afterwards `names_read` are the global names that its functions read and by which its classes
    are found, `names_bound` those that they bind; `needs` the parcels it refers to. `plain` says
    that nothing but data and functions is in it, so that to unpickle it runs no code of anybody's
    and cannot fail. `keys` are what all its parts are known by.
    """

    def __init__(
        self,
        value: object,
        find_part: FindPart,
        key_of: KeyOf,
        max_bytes: int | None,
        named: Named = NONE_NAMED,
    ) -> None:
        super().__init__(max_bytes, named)
        self.parts: list[object] = []
        self.names_read: set[str] = set()
        self.names_bound: set[str] = set()
        self.needs: set[int] = set()
        self.plain = True
        self._find_part = find_part
        self._key_of = key_of
        # The parts behind the value: pickle walks in order, so all are found when `_Parts` is met.
        self.dump((value, _Parts()))
        self.keys = keys_of(self)

    def reducer_override(self, obj: Any) -> Any:
        """How a part is pickled."""
        if isinstance(obj, _Parts):  # pickled last
            return tuple, (list(self.parts),)
        # It stands for the rank's own namespace, and is no value of the notebook.
        if obj is NAMESPACE:
            return super().reducer_override(obj)
        if isinstance(obj, Composite):
            self.plain = False
            return rank_value, self._key_of(obj)
        if isinstance(obj, FunctionType) and obj.__globals__ is namespace():
            reads, binds = names_in_code(obj.__code__)
            self.names_read |= reads
            self.names_bound |= binds
        elif isinstance(obj, Constant) or _is_part(obj):
            known = self._find_part(obj)
            if known is not None:
                self.needs.add(known[0])
                return part, known
            self.parts.append(obj)
        elif isinstance(obj, type) and _is_found(obj):
            self.names_read.add(obj.__qualname__.partition(".")[0])
        self.plain = self.plain and _cannot_fail(obj)
        return super().reducer_override(obj)


def packed(
    value: object, find_part: FindPart, key_of: KeyOf, max_bytes: int | None
) -> NotebookPacker:
    """A value that is packed, by what it is or, where it must, by the name an import gives it.

    Raises:
        Exception: whatever its class raises when it cannot be pickled.
    """
    return with_imports_by_name(
        lambda named: NotebookPacker(value, find_part, key_of, max_bytes, named)
    )


class _Parts:
    """Stands for the parts, which are known when all else has been pickled."""


def _is_part(obj: object) -> bool:
    """Whether others may refer to it: a thing with an identity that can be watched."""
    # 0 for types whose objects no weak reference can watch, such as int and list.
    if not type(obj).__weakrefoffset__ or isinstance(obj, _NO_PARTS):
        return False
    torch = sys.modules.get("torch")
    return torch is None or not isinstance(obj, (torch.storage.TypedStorage, torch.UntypedStorage))


def _is_found(kind: type) -> bool:
    """Whether pickle finds a class of the notebook by its name, which a rank's pickle does too."""
    if kind.__module__ != "__main__":
        return False
    try:
        return attrgetter(kind.__qualname__)(sys.modules["__main__"]) is kind
    except AttributeError:
        return False


def _cannot_fail(obj: Any) -> bool:
    if isinstance(obj, FunctionType) and obj.__globals__ is namespace():
        return True
    # A module travels by name, and importing it may run somebody's code.
    if isinstance(obj, ModuleType):
        name = obj.__name__
    else:
        own = isinstance(obj, (type, FunctionType, BuiltinFunctionType))
        name = getattr(obj if own else type(obj), "__module__", None) or ""
    return name.partition(".")[0] in _SAFE


def reason(error: Exception, name: str, value: object) -> str:
    """Why a value cannot be sent, in words; what to do, where it is too large."""
    if isinstance(error, TooLargeError):
        if _is_small_view(value):
            return (
                f"it is a view of a tensor of {error.num_bytes >> 20} MiB or more, and a cell "
                f"sends up to {MAX_VALUE_BYTES >> 20} MiB. Send a copy: `{name} = {name}.clone()`."
            )
        return (
            f"it takes {error.num_bytes / 2**20:.0f} MiB or more; a cell sends up to "
            f"{MAX_VALUE_BYTES >> 20} MiB. Load it in the cell, or bring it to the ranks once: "
            f"`{name} = pool.put({name})`."
        )
    return why_not(error, value, name, _pack, (Composite, Constant))


def _is_small_view(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor) and value.nbytes < MAX_VALUE_BYTES


def _pack(value: object) -> None:
    packed(value, _any_constant, key_of, MAX_VALUE_BYTES)


def _any_constant(obj: object) -> tuple[int, int] | None:
    return (obj.number, WHOLE) if isinstance(obj, Constant) else None
