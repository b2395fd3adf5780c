"""Which global names compiled code uses, and which are the rank's. Runs anywhere."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import cached_property, lru_cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any

# The rank's own in every cell, whatever the notebook calls by these names.
RANK_NAMES = frozenset({"rank", "world_size", "local_rank", "device", "torch", "dist"})

_LOADS = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"}


@lru_cache(maxsize=4096)
def names_in_code(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The global names that a function's code, and what is nested in it, reads and binds.

    It binds by `global`; `del` of a global counts as both. Attributes are not names.
    """
    reads: set[str] = set()
    assigns: set[str] = set()
    for part in with_nested(code):
        own = _bound_at(part)
        for step in dis.get_instructions(part):
            # a class body looks in its own namespace first
            if step.opname in _LOADS and not own.get(step.argval, step.offset) < step.offset:
                reads.add(step.argval)
            elif step.opname == "STORE_GLOBAL":
                assigns.add(step.argval)
            elif step.opname == "DELETE_GLOBAL":
                reads.add(step.argval)
                assigns.add(step.argval)
    return frozenset(reads), frozenset(assigns)


def names_in_object(value: Any) -> frozenset[str]:
    """The global names that a function, a class or an instance of a class of `__main__` reads.

    Wrapped functions count too: by a decorator, a property, `partial`, a method.
    """
    reads: set[str] = set()
    queue, seen = [value], set[int]()
    while queue:
        found = queue.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, FunctionType):
            if found.__module__ == "__main__":
                reads |= names_in_code(found.__code__)[0]
            queue += _cells(found)
        elif isinstance(found, type):
            queue += vars(found).values() if found.__module__ == "__main__" else ()
            queue += found.__bases__
        elif isinstance(found, MethodType):
            queue += [found.__func__, found.__self__]
        elif isinstance(found, _WRAPPERS):
            queue += [getattr(found, name, None) for name in _WRAPPED]
        else:
            queue.append(type(found))
    return frozenset(reads)


# where those keep the function
_WRAPPERS = (property, classmethod, staticmethod, cached_property, partial, type(lru_cache(int)))
_WRAPPED = ("fget", "fset", "fdel", "__func__", "func", "__wrapped__")


def _cells(function: FunctionType) -> Iterator[Any]:
    """What a function closes over and is callable; a decorator's has the decorated one there."""
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not bound yet
            continue
        if callable(content):
            yield content


def _bound_at(code: CodeType) -> dict[str, int]:
    """Where in a class body a name is bound first, for those that no way leads around."""
    steps = dis.Bytecode(code)
    jumps = [(step.offset, step.argval) for step in steps if "JUMP" in step.opname]
    jumps += [(step.offset, step.argval) for step in steps if step.opname == "FOR_ITER"]
    entries = steps.exception_entries  # type: ignore[attr-defined]
    jumps += [(entry.start, entry.target) for entry in entries]
    found: dict[str, int] = {}
    unsure = {step.argval for step in steps if step.opname == "DELETE_NAME"}
    for step in steps:
        around = any(start < step.offset < end for start, end in jumps)
        if step.opname == "STORE_NAME" and not around and step.argval not in unsure:
            found.setdefault(step.argval, step.offset)
    return found


def with_nested(code: CodeType) -> Iterator[CodeType]:
    """The code and all that is nested in it: functions, class bodies, comprehensions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from with_nested(constant)
