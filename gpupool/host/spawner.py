"""The agent's side of the fork server: start it, ask it for processes. Runs in the agent."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from gpupool.core.machine.processes import command_for
from gpupool.core.wire.agent import ANSWERS, Answer, Ready, Spawn
from gpupool.core.wire.json_lines import JsonLines, encode


class Spawner:
    """A fork server that is started when it is needed, and again should it have been killed."""

    def __init__(self, folder: Path, modules: list[str]) -> None:
        self.log = folder / "forkserver.log"
        self.ready = False
        self._folder = folder
        self._modules = modules
        self._process: subprocess.Popen[bytes] | None = None
        self._unsent = b""
        self._numbers = itertools.count(1)
        self._expected: dict[str, int] = {}  # name -> number of the request that is to be answered

    @property
    def pid(self) -> int | None:
        """The fork server's; None while there is none."""
        return self._process.pid if self._process else None

    @property
    def expects(self) -> bool:
        """Whether a process is still to come."""
        return bool(self._expected)

    def start(self) -> JsonLines[Answer]:
        """Start the fork server; what it says is to be read and given to `hear`."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command_for("gpupool.host.forkserver"), str(os.getpid()), *self._modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                # OpenBLAS would start its threads when imported, and no thread survives a fork.
                # torch makes a folder for compiled code already when it is imported; that of the
                # ranks is chosen in `engine/boot.py`.
                env={
                    "TORCHINDUCTOR_CACHE_DIR": str(self._folder / "inductor"),
                    **os.environ,
                    "OPENBLAS_NUM_THREADS": "1",
                },
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        return JsonLines(self._process.stdout, ANSWERS)

    def ask(self, request: Spawn) -> None:
        """Ask for a process; it comes when the fork server has imported what it needs."""
        number = next(self._numbers)
        self._expected[request.name] = number
        self._unsent += encode(replace(request, number=number))
        self._pass_on()

    def hear(self, said: Answer) -> bool:
        """Receive what the fork server said; returns whether it is a process that is wanted."""
        if self._process is None:  # it said so before it ended, and has been reaped first
            return False
        self._pass_on()
        if isinstance(said, Ready):
            self.ready = True
            return False
        if self._expected.get(said.name) != said.number:  # who asked has gone or was given up
            return False
        del self._expected[said.name]
        return True

    def forget(self, names: Collection[str]) -> None:
        """What was asked for under these names is not wanted any more."""
        for name in names:
            self._expected.pop(name, None)

    def forget_all(self) -> None:
        """Nothing of what was asked for is wanted any more."""
        self._expected.clear()

    def lost(self, status: int) -> None:
        """It has ended and was reaped."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.returncode = status  # the agent reaps, not Popen
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process = None
        self.ready = False
        self._unsent = b""
        self.forget_all()

    def _pass_on(self) -> None:
        """Write what the pipe takes now; the rest when the fork server has read some of it."""
        assert self._process is not None
        assert self._process.stdin is not None
        # a pipe that is full: the agent must not wait; a killed server is reported when reaped
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                written = os.write(self._process.stdin.fileno(), self._unsent)
                self._unsent = self._unsent[written:]
