"""Which global names compiled code uses, and which are the rank's. Runs anywhere."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Sequence
from functools import lru_cache
from types import CodeType
from typing import NamedTuple

# The rank's own in every cell, whatever the notebook calls by these names.
RANK_NAMES = frozenset({"rank", "world_size", "local_rank", "device", "torch", "dist"})

_LOADS = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"}
# What may stand between an import and the name that it binds.
_AFTER_IMPORT = {"SWAP", "POP_TOP", "EXTENDED_ARG", "NOP"}


class Globals(NamedTuple):
    """The global names that code, and what is nested in it, uses. Attributes are not names."""

    reads: set[str]
    """What it looks up before it has surely bound it; what it deletes, too."""
    assigns: set[str]
    imports: set[str]
    deletes: set[str]


def globals_in(code: CodeType, *, is_cell: bool = False) -> Globals:
    found = Globals(set(), set(), set(), set())
    steps = list(dis.get_instructions(code))
    bound_at, is_imported = _bound_at(code, steps), False
    for step in steps:
        verb, _, scope = step.opname.partition("_")
        if step.opname in _LOADS:
            # a class body looks in its own namespace first, but for a comprehension in it
            is_own = bound_at.get(step.argval, step.offset) < step.offset
            if not is_own or scope == "GLOBAL":
                found.reads.add(step.argval)
        elif scope == "GLOBAL" or (scope == "NAME" and is_cell):
            if verb == "STORE":
                (found.imports if is_imported else found.assigns).add(step.argval)
            elif verb == "DELETE":
                found.deletes.add(step.argval)
                found.reads.add(step.argval)
        is_imported = verb == "IMPORT" or (is_imported and step.opname in _AFTER_IMPORT)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            for names, nested in zip(found, _globals_in_function(constant), strict=True):
                names |= nested
    return found


_globals_in_function = lru_cache(maxsize=4096)(globals_in)


def names_in_code(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The global names that a function's code reads, and those that it binds or deletes."""
    reads, *bound = _globals_in_function(code)
    return frozenset(reads), frozenset().union(*bound)


def _bound_at(code: CodeType, steps: Sequence[dis.Instruction]) -> dict[str, int]:
    """Where a cell or class body binds a name first, for those that no way leads around."""
    if code.co_flags & inspect.CO_OPTIMIZED:  # a function: its names are no globals
        return {}
    stores = [step for step in steps if step.opname == "STORE_NAME"]
    if not stores:
        return {}
    jumps = [(s.offset, s.argval) for s in steps if "JUMP" in s.opname or s.opname == "FOR_ITER"]
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    jumps += [(entry.start, entry.target) for entry in entries]
    unsure = {step.argval for step in steps if step.opname == "DELETE_NAME"}
    found: dict[str, int] = {}
    for name, offset in ((step.argval, step.offset) for step in stores):
        if name not in unsure and not any(start < offset < end for start, end in jumps):
            found.setdefault(name, offset)
    return found
