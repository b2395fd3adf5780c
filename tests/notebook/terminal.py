"""A real IPython shell without a kernel, in a process of its own, so that its pool is its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Self

from gpupool.notebook.cells.lines import FOLD_WITHIN_S
from tests.notebook.kernel import inherited, plain

_SHELL = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
shell = InteractiveShell.instance()
answers = sys.stdout
for line in sys.stdin:
    with capture_output(display=False) as captured:
        ran = shell.run_cell(json.loads(line), store_history=True)
    answer = [captured.stdout, captured.stderr, ran.success]
    print(json.dumps(answer), file=answers, flush=True)
"""


@dataclass
class Shown:
    """What a cell has left on the terminal, without colours, and whether it succeeded."""

    stdout: str
    stderr: str
    success: bool


class Terminal:
    """A shell to run cells in; a context manager. `variables` are added to its environment."""

    def __init__(self, **variables: str) -> None:
        self._variables = variables

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="gpupool-test-")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SHELL],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**inherited(), "IPYTHONDIR": self._folder.name, **self._variables},
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            assert self._process.wait(60) == 0
        finally:
            self._process.kill()
            self._process.stdout.close()
            self._folder.cleanup()

    def run(self, code: str, timeout_s: float = 100.0) -> Shown:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        alarm = threading.Timer(timeout_s, self._process.kill)
        alarm.start()
        try:
            self._process.stdin.write(json.dumps(code) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        finally:
            alarm.cancel()
        assert answer, f"the shell has ended, or took longer than {timeout_s:.0f} s: {code}"
        stdout, stderr, success = json.loads(answer)
        return Shown(plain(stdout), plain(stderr), success)

    def run_briefly(self, code: str) -> Shown:
        """A cell that was over soon: so the same line of several ranks was one.

        On a busy machine it may take some tries until one is.
        """
        for _ in range(200):
            began = time.monotonic()
            shown = self.run(code)
            if time.monotonic() - began < FOLD_WITHIN_S:
                return shown
        raise AssertionError(f"no cell was over within {FOLD_WITHIN_S} s: {code}")
