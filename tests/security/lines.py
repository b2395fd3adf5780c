"""A process of another user that does what it is told: a line of JSON each way, one at a time."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
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
        began = time.monotonic()
        try:
            answer = {"value": commands[asked.pop("do")](**asked)}
        except BaseException as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps({**answer, "seconds": time.monotonic() - began}), file=answers)


class Actor:
    """The test's end of it. Its process is the leader of its process group.

    `log` is the file with what it has printed.
    """

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name, self.log, self.pid = name, log, process.pid
        self._process = process
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """What came of it: "value", or "error" (its class) and "text"; and "seconds"."""
        self.begin(do, **arguments)
        return self.answer()

    def do(self, do: str, **arguments: Any) -> Any:
        """The value; fails if there was an error."""
        answer = self.ask(do, **arguments)
        assert "error" not in answer, f"{self.name}: {do}: {answer['error']}: {answer['text']}"
        return answer["value"]

    def begin(self, do: str, **arguments: Any) -> None:
        """Ask, and do not wait for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The answer to what was begun."""
        try:
            answer = self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            raise AssertionError(f"{self.name} has not answered; {self._end_of_log()}") from None
        assert answer is not None, f"{self.name} has ended; {self._end_of_log()}"
        return answer

    def close(self) -> None:
        """End it: its stdin ends, and what is left of its group after that is killed.

        May be called again.
        """
        if self._process.returncode is not None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(AssertionError):
            until(self.has_ended, 3.0)
        os.killpg(self.pid, signal.SIGKILL)  # it is not reaped yet: nobody else has its number
        self._process.wait()
        self._reader.join()

    def has_ended(self) -> bool:
        """Whether its process has."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, how) is not None

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._answers.put(json.loads(line))
        self._answers.put(None)

    def _end_of_log(self) -> str:
        return f"its log ends with: {self.log.read_text(errors='replace')[-3000:]}"
