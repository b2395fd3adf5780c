"""What torch is set to in a process: the notebook's settings, for the ranks. Runs anywhere."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

_SETTINGS = ("default_dtype", "float32_matmul_precision", "deterministic_debug_mode")


def torch_settings() -> dict[str, Any]:
    """Function of torch that sets it -> what is set here; nothing while torch is not imported."""
    found = {}
    for name in _SETTINGS:
        # A thread may just be importing torch; and torch refuses to tell a mixture of precisions.
        with contextlib.suppress(AttributeError, RuntimeError):
            found[f"set_{name}"] = getattr(sys.modules.get("torch"), f"get_{name}")()
    return found
