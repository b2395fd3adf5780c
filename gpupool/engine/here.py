"""Whether this process is an engine or the notebook itself. Runs on engines; imports nothing.

An inline pool runs engine code in the notebook's own process (`inline.py`, which sets these). The
few places where that makes a difference ask here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

rank: dict[str, Any] | None = None
"""The notebook's place as rank 0 of 1; None on an engine, which has it from its environment."""

publish: Callable[[str, Any], Any] | None = None
"""While an inline call runs: takes (kind, content), as `gpupool.pool.iopub.OnMessage` does."""


def is_inline() -> bool:
    """Whether this process is the notebook."""
    return rank is not None
