"""Code keeps its file and lines, also with the oldest cloudpickle allowed: errors show its cell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OLDEST = ROOT / "build" / "cloudpickle-3.1.0"  # put there by `make`
CELL = """
def outer(x):
    def inner(y):
        return y / 0
    return inner(x)

class Network:
    def forward(self, x):
        return (lambda: outer(x))()
"""
LINES = ["<cell-7>:9", "<cell-7>:9", "<cell-7>:5", "<cell-7>:4"]
NOTEBOOK = f"""
import cloudpickle, sys
from gpupool.core.wire.pickles import pack
from gpupool.core.wire.reductions import dumps
exec(compile({CELL!r}, "<cell-7>", "exec"), globals())
assert dumps(outer) == dumps(outer)
sys.stdout.buffer.write(cloudpickle.__version__.encode() + b" " + pack((outer, Network())))
"""
RANK = """
import sys, traceback
from gpupool.core.wire.pickles import unpack
outer, network = unpack(sys.stdin.buffer.read())
try:
    network.forward(1)
except ZeroDivisionError as error:
    shown = traceback.extract_tb(error.__traceback__)[1:]
    print(*(f"{frame.filename}:{frame.lineno}" for frame in shown))
"""


def test_code_keeps_its_file_and_lines() -> None:
    if not OLDEST.exists():
        pytest.skip("make puts cloudpickle 3.1.0 into build/")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(OLDEST), str(ROOT)])}

    def run(script: str, data: bytes) -> bytes:
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=environ, input=data, capture_output=True, timeout=120)
        assert done.stderr == b""
        return done.stdout

    used, packed = run(NOTEBOOK, b"").split(b" ", 1)
    assert used == b"3.1.0"
    assert run(RANK, packed).decode().split() == LINES
