"""Which global names compiled code uses. Runs anywhere."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType

_READS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_BINDS = {"STORE_GLOBAL", "DELETE_GLOBAL"}


@lru_cache(maxsize=4096)
def names_in_code(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """(reads, assigns): the global names that a function's code reads, and binds by `global`.

    What is nested in it counts too: inner functions, class bodies, comprehensions.
    """
    reads: set[str] = set()
    assigns: set[str] = set()
    for part in _nested(code):
        for instruction in dis.get_instructions(part):
            if instruction.opname in _READS:
                reads.add(instruction.argval)
            elif instruction.opname in _BINDS:
                assigns.add(instruction.argval)
    return frozenset(reads), frozenset(assigns)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
