"""Calls what `with_transform` was given. Runs anywhere; no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def apply(transform: Callable[..., Any], name: str, *images: Any) -> Any:
    """`transform(*images)`; what it raises gets a note that says with which image: `name`."""
    try:
        return transform(*images)
    except Exception as error:
        error.add_note(f"The transform raised this for {name}")
        raise
