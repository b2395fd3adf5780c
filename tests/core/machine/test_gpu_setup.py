"""How a machine is set up for GPUs, as a pool finds out before it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpupool.core.machine.gpu_setup import (
    nccl_joins_instances,
    notes,
)
from tests.servers.nvidia_driver import install_torch

MPS = {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps"}

LOOK = """
import sys
from gpupool.core.machine.gpu_setup import nccl_version, why_torch_cannot
print(why_torch_cannot(("550.54", 12)))
print(nccl_version())
print("torch" in sys.modules)
"""


def torch_of(folder: Path, version: str, cuda: str | None, nccl: str = "") -> list[str]:
    """What is said of a torch that is installed in `folder`."""
    asked = subprocess.run(
        [sys.executable, "-c", LOOK],
        env={**os.environ, **install_torch(folder, version, cuda, nccl)},
        capture_output=True,
        text=True,
        check=True,
    )
    return asked.stdout.splitlines()


def test_a_torch_that_needs_a_newer_driver(tmp_path: Path) -> None:
    why, _, is_loaded = torch_of(tmp_path, "2.15.0+cu132", "13.2")
    assert why.startswith(
        "the NVIDIA driver 550.54 serves CUDA 12, and torch 2.15.0+cu132 needs 13"
    )
    assert is_loaded == "False"


def test_a_torch_for_an_older_cuda_is_served(tmp_path: Path) -> None:
    why, nccl, _ = torch_of(tmp_path, "2.11.0+cu128", "12.8", nccl="2.28.9")
    assert (why, nccl) == ("", "(2, 28, 9)")


def test_a_torch_for_cpus_cannot_use_a_gpu(tmp_path: Path) -> None:
    why, nccl, _ = torch_of(tmp_path, "2.15.0+cpu", None)
    assert why.startswith("torch 2.15.0+cpu is built without CUDA")
    assert nccl == "None"


@pytest.mark.parametrize(
    ("version", "joins"),
    [(None, False), ((2, 29, 3), False), ((2, 30), True)],
)
def test_instances_of_one_gpu_are_joined_from_nccl_2_30_on(
    version: tuple[int, ...] | None, joins: bool
) -> None:
    assert nccl_joins_instances(version) is joins


def test_a_server_of_mps_is_reported() -> None:
    (note,) = notes(1, MPS)
    assert "MPS" in note
    assert notes(0, MPS) == []
