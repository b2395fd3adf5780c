"""What torch is set to in a process: the notebook's settings, for the ranks. Runs anywhere."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

_GETTERS = {
    "set_default_dtype": "get_default_dtype",
    "set_float32_matmul_precision": "get_float32_matmul_precision",
    "set_deterministic_debug_mode": "get_deterministic_debug_mode",
}


def torch_settings() -> dict[str, Any]:
    """Function of torch that sets it -> what is set here; nothing while torch is not imported."""
    found = {}
    for setter, getter in _GETTERS.items():
        # A thread may just be importing torch; and torch refuses to tell a mixture of precisions.
        with contextlib.suppress(AttributeError, RuntimeError):
            found[setter] = getattr(sys.modules.get("torch"), getter)()
    return found
