"""How a machine is set up for GPUs, as a pool finds out before it starts."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpupool.core.machine.gpu_setup import (
    nccl_joins_instances,
    nccl_version,
    notes,
    why_torch_cannot,
    without_driver,
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


def test_this_torch_and_its_nccl_are_known_without_loading_them() -> None:
    import torch

    cuda = torch.version.cuda
    assert bool(why_torch_cannot(("999.1", 99))) is (cuda is None)
    if cuda is None:
        assert nccl_version() is None
    else:
        installed = importlib.metadata.version(f"nvidia-nccl-cu{cuda.partition('.')[0]}")
        assert nccl_version() == tuple(map(int, installed.split(".")))


@pytest.mark.parametrize(
    ("version", "joins"),
    [(None, False), ((2, 29, 3), False), ((2, 30), True), ((2, 30, 7), True), ((3, 0), True)],
)
def test_instances_of_one_gpu_are_joined_from_nccl_2_30_on(
    version: tuple[int, ...] | None, joins: bool
) -> None:
    assert nccl_joins_instances(version) is joins


def test_nccl_knows_the_variable_that_its_version_stands_for() -> None:
    spec = importlib.util.find_spec("nvidia.nccl")
    if spec is None or not nccl_joins_instances(nccl_version()):
        pytest.skip("no NCCL here that could know it")
    (folder,) = spec.submodule_search_locations or ()
    with (
        open(Path(folder) / "lib" / "libnccl.so.2", "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library,
    ):
        assert library.find(b"NCCL_MULTI_RANK_GPU_ENABLE") > 0


def test_a_server_of_mps_is_reported() -> None:
    (note,) = notes(1, MPS)
    assert "MPS" in note
    assert notes(0, MPS) == []


def test_little_shared_memory_is_reported(tmp_path: Path) -> None:
    shared = tmp_path / "dev" / "shm"
    shared.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(shared)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system of 64 MB")
    try:
        (note,) = notes(2, {}, tmp_path)
        assert "/dev/shm) has 64 MiB" in note
        assert "--shm-size" in note
        assert notes(1, {}, tmp_path) == []  # one rank has nobody to share with
    finally:
        subprocess.run(["umount", shared], check=True)
    assert notes(2, {}, tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        ("Linux version 6.6.87.2-microsoft-standard-WSL2 (root@x) (gcc 11.2)", "/usr/lib/wsl/lib"),
        ("Linux version 6.8.0-60-generic (buildd@x) (gcc 13.2)", ""),
    ],
)
def test_wsl_has_the_driver_of_windows(tmp_path: Path, kernel: str, says: str) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "version").write_text(kernel)
    assert says in without_driver(tmp_path)
    assert bool(without_driver(tmp_path)) is bool(says)
