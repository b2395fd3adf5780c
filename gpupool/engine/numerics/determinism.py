"""Two trainings from one seed that are equal to the last bit on GPUs. Runs on engines.

A CPU computes the same each time. On a GPU some kernels add with atomic operations, in the order in
which threads come, and cuDNN and cuBLAS may choose another kernel each time.

cuBLAS reads CUBLAS_WORKSPACE_CONFIG once in a process. So each engine with a GPU has it from the
start (`engine_environment` in pool/launchers/processes.py), which costs some MiB and no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_CUDNN = torch.backends.cudnn


@contextmanager
def deterministic(is_asked: bool) -> Iterator[None]:
    """While this lasts, torch computes the same from the same numbers, or raises RuntimeError."""
    was = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = _CUDNN.deterministic, _CUDNN.benchmark
    try:
        if is_asked:
            # torch's own switch decides whether cuDNN must be deterministic; benchmark is apart
            torch.use_deterministic_algorithms(True)
            _CUDNN.deterministic, _CUDNN.benchmark = True, False
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned_only)
        _CUDNN.deterministic, _CUDNN.benchmark = cudnn
