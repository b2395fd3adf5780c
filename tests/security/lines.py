"""A process of another user that does what it is told: a line of JSON each way, one at a time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.processes import until

ANSWER_S = 150.0  # longer than the longest thing that a pool waits for


def serve(commands: Mapping[str, Callable[..., Any]]) -> None:
    """Do what is asked on stdin, until its end; what else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"value": commands[asked.pop("do")](**asked)}
        except BaseException as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), file=answers)


class Actor:
    """The test's end of it. Its process leads its process group; `log` has what it has printed."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name, self.log, self._process = name, log, process

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """What came of it: "value", or "error" (its class) and "text"."""
        told, answers = self._process.stdin, self._process.stdout
        assert told is not None
        assert answers is not None
        told.write(json.dumps({"do": do, **arguments}) + "\n")
        told.flush()
        ready, _, _ = select.select([answers], [], [], ANSWER_S)
        line = answers.readline() if ready else ""
        assert line, f"{self.name}: no answer; {self.log.read_text(errors='replace')[-3000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def do(self, do: str, **arguments: Any) -> Any:
        answer = self.ask(do, **arguments)
        assert "error" not in answer, f"{self.name}: {do}: {answer['error']}: {answer['text']}"
        return answer["value"]

    def close(self) -> None:
        if self._process.returncode is not None:
            return
        with self._process as process:  # its pipes are closed at the end, and it is reaped
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            with contextlib.suppress(AssertionError):
                until(self._has_ended, 3.0)
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet: nobody else has its number

    def _has_ended(self) -> bool:
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, how) is not None
