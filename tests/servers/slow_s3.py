"""A network as it is, before an S3 server of this machine: latency and faults. Runs anywhere.

    with SeaweedServer() as server, SlowS3(server.endpoint, first_byte_ms=(30, 60)) as slow:
        os.environ.update(server.env, AWS_ENDPOINT_URL=slow.endpoint)
        slow.inject(Fault("503", share=0.1), Fault("cut", match="/7.jpg", times=1))
        ...
        print(slow.stats())        # {"requests": 120, "max_at_once": 64, "503": 11, "cut": 1}

It passes bytes on, request by request (HTTP/1.1 with keep-alive, as S3 clients speak), in a process
of its own, so that it does not compute in the client's. Signatures stay good: the Host header is
passed on as it is.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.servers.proxy import Fault


class SlowS3:
    """A proxy on a free loopback port before `endpoint` (http://127.0.0.1:PORT).

    Every request waits a random time within `first_byte_ms` before it is passed on. It ends with
    this process, also after a kill -9.
    """

    def __init__(
        self, endpoint: str, first_byte_ms: tuple[float, float] = (0, 0), seed: int = 0
    ) -> None:
        self._config = {"first_byte_ms": list(first_byte_ms), "seed": seed}
        self._target = int(endpoint.rsplit(":", 1)[1])
        self._process: subprocess.Popen[str] | None = None
        self.endpoint = ""

    @property
    def pid(self) -> int:
        """The process id of the running proxy."""
        assert self._process is not None, "the proxy is not running"
        return self._process.pid

    def start(self) -> Self:
        """Start the proxy and wait until it listens."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.servers.proxy", str(self._target)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self.endpoint = f"http://127.0.0.1:{self._ask(self._config)['port']}"
        return self

    def stop(self) -> None:
        """End the proxy and all its connections; a second call does nothing."""
        if self._process is not None:
            self._process.kill()
            with self._process:  # closes the pipes and waits
                self._process = None

    def inject(self, *faults: Fault) -> None:
        """These faults from now on, instead of earlier ones; the first that fits happens."""
        self._ask({"faults": [asdict(fault) for fault in faults]})

    def be_gone(self, is_gone: bool = True) -> None:
        """Refuse every connection and end those there are; False: be there again."""
        self._ask({"gone": is_gone})

    def stats(self) -> dict[str, int]:
        """How many requests there were since the last call, the most at once, and each fault."""
        return dict(self._ask({"stats": True})["stats"])

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None, "the proxy is not running"
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the proxy has ended; see its error output above")
        return dict(json.loads(line))
