"""What a pickle for the ranks refers to instead of containing it. Runs anywhere.

The functions here only stand in the pickle: a rank puts its own in their place when it reads one
(`gpupool/engine/variables.py`).
"""

from __future__ import annotations

from typing import Any

WHOLE = -1  # the index of a parcel's value itself among its parts


def part(number: int, index: int) -> Any:
    """An object that came to the rank in an earlier parcel."""
    raise NotImplementedError("only a rank has it")


def rank_value(name: str, path: tuple[str, ...], version: int) -> Any:
    """The rank's own value of a name, or an attribute of it."""
    raise NotImplementedError("only a rank has it")
