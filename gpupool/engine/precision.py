"""In which numbers a network computes. Runs on engines."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Inside, networks compute mixed in "bf16" or "fp16"; in "float32", as they are."""
    if precision not in _DTYPES:
        return nullcontext()
    return torch.autocast(device.type, _DTYPES[precision])
