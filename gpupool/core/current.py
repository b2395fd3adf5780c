"""The pool of this notebook, for code that may not know pools. Runs anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any


def _none() -> None:
    return None


find_pool: Callable[[], Any] = _none
"""Returns the running pool, or None; `gpupool/pool/session.py` puts the real one here."""

trial: ContextVar[Callable[[int, Mapping[str, float]], None] | None] = ContextVar(
    "trial", default=None
)
"""Hears what is reported where this code is a task of a rank, or a trial of a sweep."""

is_on_rank: Callable[[], bool] = bool
"""Whether this code runs on a rank, in a cell or a callback; engines put theirs here."""
