"""Whether a GPU can still be used is asked without waiting for what it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from gpupool.data import device as devices
from gpupool.data.device import Cuda
from gpupool.engine.cells.error_hints import is_context_lost

ERRORS = [
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("NCCL Error 1: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
    torch.AcceleratorError("an illegal memory access was encountered"),
]


class Gpu(Cuda):
    """Answers as a GPU does of which a kernel is under way; or as one whose context is lost."""

    def __init__(self, is_lost: bool) -> None:
        super().__init__(torch.device("cuda", 0))
        self._is_lost = is_lost

    def is_done(self) -> bool:
        if self._is_lost:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return False

    def synchronize(self) -> None:
        raise AssertionError("a collective that is under way may never end")


@contextmanager
def placed(gpu: Gpu) -> Iterator[None]:
    """Have `devices.of` give this one for its name, inside."""
    devices.put(gpu)
    try:
        yield
    finally:
        del devices._devices[gpu.device]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("is_lost", [True, False])
def test_a_gpu_is_asked_whether_its_context_is_lost(error: Exception, is_lost: bool) -> None:
    with placed(Gpu(is_lost)):
        assert is_context_lost(ValueError("first"), error) == is_lost
    assert not is_context_lost(error)  # no GPU is in use


def test_other_errors_do_not_ask() -> None:
    with placed(Gpu(is_lost=True)):
        assert not is_context_lost(ValueError("CUDA is no RuntimeError"), RuntimeError("shapes"))
        assert not is_context_lost(torch.OutOfMemoryError("CUDA out of memory"))
