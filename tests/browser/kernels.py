"""Kernels of other versions of ipykernel than the one that is installed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.browser.lab import Lab

BUILD = Path(__file__).parents[2] / "build"


def kernel_of(lab: Lab, version: str) -> str:
    """The name of a kernel with this ipykernel; "": the one that is installed."""
    if not version:
        return "python3"
    folder = BUILD / f"ipykernel-{version}"
    if not folder.is_dir():
        pytest.skip(f"ipykernel {version} is not in {folder}: make test puts it there")
    return lab.add_kernel(folder.name, folder)
