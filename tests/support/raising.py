"""`pytest.raises` for errors of gpupool: by their attributes, as the wording may change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from gpupool.core.errors import GpuPoolError, SpmdError

E = TypeVar("E", bound=GpuPoolError)
_OURS = re.compile(r"gpupool/(?:core|data|host|engine|pool|spmd|training|check|notebook)/")


def frames_of_ours(text: str) -> list[str]:
    """The lines that name a file of the package; its clone may lie in a folder of that name."""
    return [line for line in text.splitlines() if _OURS.search(line)]


def same_on(error: SpmdError, *ranks: int) -> bool:
    """Whether just these ranks have failed, none by another one, and all with the same error."""
    said = {(str(one), one.freed) for one in error.errors.values()}
    return error.ranks == ranks and len(said) == 1 and not error.first.freed


@contextmanager
def raises(
    expected: type[E],
    *names: str | tuple[str, ...],
    shown: str | tuple[str, ...] = (),
    **attributes: Any,
) -> Iterator[pytest.ExceptionInfo[E]]:
    """The block raises `expected`, with these attributes.

    `names` and `shown` are what the message is filled with: names, hosts, paths and numbers, no
    English. `ename` is, of an `SpmdError`, the class that its first rank raised.
    """
    with pytest.raises(expected) as caught:
        yield caught
    error = caught.value
    said = str(error)
    for parts in (*names, shown):
        for part in (parts,) if isinstance(parts, str) else parts:
            assert part in said
    for name, value in attributes.items():
        source = error.first if name == "ename" and isinstance(error, SpmdError) else error
        assert getattr(source, name) == value, said
