"""`pytest.raises` for errors of gpupool: by their attributes, as the wording may change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from gpupool.core.errors import GpuPoolError, SpmdError

E = TypeVar("E", bound=GpuPoolError)


@contextmanager
def raises(
    expected: type[E], kind: str, *names: str, **others: Any
) -> Iterator[pytest.ExceptionInfo[E]]:
    """The block raises `expected`, of this `kind` and with just these `names`, in any order.

    `others` are further attributes. `ename` is, of an `SpmdError`, the class that its first rank
    raised. The sentence itself is in tests/messages/.
    """
    with pytest.raises(expected) as caught:
        yield caught
    error = caught.value
    said = str(error)
    assert (error.kind, sorted(error.names)) == (kind, sorted(names)), said
    for name, value in others.items():
        source = error.first if name == "ename" and isinstance(error, SpmdError) else error
        assert getattr(source, name) == value, said
