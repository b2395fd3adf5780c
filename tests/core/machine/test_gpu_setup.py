"""How a machine is set up for GPUs, as a pool finds out before it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpupool.core.machine.gpu_setup import little_shared_memory
from tests.servers.nvidia_driver import install_torch

LOOK = """
import sys
from gpupool.core.machine.gpu_setup import why_torch_cannot
print(why_torch_cannot())
print("torch" in sys.modules)
"""


@pytest.mark.parametrize("cuda", [None, "12.8"])
def test_a_torch_for_cpus_cannot_use_a_gpu(tmp_path: Path, cuda: str | None) -> None:
    asked = subprocess.run(
        [sys.executable, "-c", LOOK],
        env={**os.environ, **install_torch(tmp_path, "2.15.0", cuda)},
        capture_output=True,
        text=True,
        check=True,
    )
    why, is_loaded = asked.stdout.splitlines()
    assert ("built without CUDA" in why) is (cuda is None)
    assert is_loaded == "False"


def test_little_shared_memory_is_a_sentence_and_none_is_nothing(tmp_path: Path) -> None:
    assert little_shared_memory(tmp_path / "none") == ""
    room = os.statvfs("/dev/shm")
    is_little = room.f_blocks * room.f_frsize < 2**30
    assert ("docker run --shm-size" in little_shared_memory()) is is_little
