"""Two trainings from one seed that are equal to the last bit on GPUs. Runs on engines.

A CPU computes the same each time; on a GPU some kernels add in the order in which threads come.
cuBLAS reads CUBLAS_WORKSPACE_CONFIG once: each engine with a GPU has it from the start
(`engine_environment` in pool/launchers/processes.py), which costs some MiB and no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic(is_asked: bool) -> Iterator[None]:
    """While this lasts, torch computes the same from the same numbers, or raises RuntimeError."""
    cudnn = torch.backends.cudnn
    was = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings = cudnn.deterministic, cudnn.benchmark
    try:
        if is_asked:
            torch.use_deterministic_algorithms(True)
            cudnn.deterministic, cudnn.benchmark = True, False
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned_only)
        cudnn.deterministic, cudnn.benchmark = settings
