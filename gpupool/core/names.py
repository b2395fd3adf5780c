"""Which global names compiled code uses. Runs anywhere."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType

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
