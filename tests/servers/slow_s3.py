"""A network as it is, before an S3 server of this machine: latency and faults. Runs anywhere.

    with SeaweedServer() as server, SlowS3(server.endpoint, first_byte_ms=(30, 60)) as slow:
        os.environ.update(server.env, AWS_ENDPOINT_URL=slow.endpoint)
        slow.inject(Fault("503", share=0.1), Fault("cut", match="/7.jpg", times=1))
        ...
        print(slow.stats())        # {"requests": 120, "max_at_once": 64, "503": 11, "cut": 1}

It passes bytes on, request by request (HTTP/1.1 with keep-alive, as S3 clients speak), in a process
of its own, so that it does not compute in the client's: this file, which answers each command on
stdin with its port, both one JSON object a line. Signatures stay good: the Host header is passed on
as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

ERRORS = {
    "503": ("503 Slow Down", "SlowDown", "Please reduce your request rate."),
    "500": ("500 Internal Server Error", "InternalError", "We encountered an internal error."),
    "expired": ("403 Forbidden", "ExpiredToken", "The provided token has expired."),
    "denied": ("403 Forbidden", "AccessDenied", "Access Denied."),
}
# What breaks the connection: reset at once, half of the body and the end, half and then silence,
# no answer at all.
BREAKS = ("reset", "cut", "stall", "silence")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Fault:
    """What happens to a `share` of the requests with `match` in the first line, `times` at most.

    `kind` is one of "503", "500", "expired", "denied", "reset", "cut", "stall", "silence"; `method`
    "GET", "PUT".
    """

    kind: str
    share: float = 1.0
    match: str = ""
    times: int | None = None
    method: str = "GET"

    def __post_init__(self) -> None:
        known = (*ERRORS, *BREAKS)
        if self.kind not in known:
            raise ValueError(f"kind={self.kind!r} must be one of {', '.join(known)}")


class SlowS3:
    """A proxy on a free loopback port before `endpoint` (http://127.0.0.1:PORT).

    Every request waits a random time within `first_byte_ms` before it is passed on. It ends with
    this process, also after a kill -9.
    """

    def __init__(self, endpoint: str, first_byte_ms: tuple[float, float] = (0, 0)) -> None:
        self._arguments = [endpoint.rsplit(":", 1)[1], *map(str, first_byte_ms)]
        self.endpoint = ""

    def __enter__(self) -> Self:
        """Start the proxy and wait until it listens."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.servers.slow_s3", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self.endpoint = f"http://127.0.0.1:{self._ask({})['port']}"
        return self

    def __exit__(self, *error: object) -> None:
        """End the proxy and all its connections."""
        self._process.kill()
        with self._process:  # closes the pipes and waits
            pass

    def inject(self, *faults: Fault) -> None:
        """These faults from now on, instead of earlier ones; the first that fits happens."""
        self._ask({"faults": [asdict(fault) for fault in faults]})

    def be_gone(self, is_gone: bool = True) -> None:
        """Refuse every connection and end those there are; False: be there again."""
        self._ask({"gone": is_gone})

    def stats(self) -> dict[str, int]:
        """How many requests there were since the last call, the most at once, and each fault."""
        return dict(self._ask({"stats": True})["stats"])

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        told, answers = self._process.stdin, self._process.stdout
        assert told is not None
        assert answers is not None
        told.write(json.dumps(command) + "\n")
        told.flush()
        line = answers.readline()
        if not line:
            raise RuntimeError("the proxy has ended; see its error output above")
        return dict(json.loads(line))


# ---- its process -----------------------------------------------------------------------------


class _Proxy:
    """What the connections share: where to, how late, what goes wrong; and the numbers."""

    def __init__(self, target: int, *first_byte_ms: float) -> None:
        self.target = target
        self.random = random.Random(0)
        self.first_byte_s = [ms / 1e3 for ms in first_byte_ms]
        self.faults: list[tuple[Fault, list[int]]] = []  # with how often it happened
        self.stats: Counter[str] = Counter()
        self.at_once = 0
        self.clients: set[asyncio.WriteTransport] = set()
        self.is_gone = False

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        """Change what the command names; it may ask for the numbers since it last did."""
        if "faults" in command:
            self.faults = [(Fault(**fault), [0]) for fault in command["faults"]]
        if "gone" in command:
            self.is_gone = command["gone"]
            for client in self.clients if self.is_gone else ():
                client.abort()
        if "stats" not in command:
            return {}
        stats, self.stats = self.stats, Counter()
        return {"stats": stats}

    def choose(self, request_line: str) -> str:
        """The kind of fault that befalls a request, "" for none."""
        method = request_line.split(" ")[0]
        for fault, happened in self.faults:
            used_up = fault.times is not None and happened[0] >= fault.times
            fits = fault.method == method and fault.match in request_line
            if not used_up and fits and self.random.random() < fault.share:
                happened[0] += 1
                self.stats[fault.kind] += 1
                return fault.kind
        return ""

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a client, with one of its own to the server."""
        client, loop = writer.transport, asyncio.get_running_loop()
        self.clients.add(client)
        with contextlib.ExitStack() as stack:
            stack.callback(self.clients.discard, client)
            stack.callback(client.abort)
            # nobody listens there, or the client has gone
            stack.enter_context(contextlib.suppress(OSError, EOFError))
            server, answers = await loop.create_connection(
                lambda: _Answers(self, client), "127.0.0.1", self.target
            )
            stack.callback(server.close)
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                is_wanted = await self._begin(head, answers)
                if is_wanted:
                    server.write(head)
                length = _LENGTH.search(head)
                left = int(length[1]) if length else 0
                while left:  # the body goes where its head went
                    piece = await reader.readexactly(min(left, 1 << 16))
                    left -= len(piece)
                    if is_wanted:
                        server.write(piece)

    async def _begin(self, head: bytes, answers: _Answers) -> bool:
        """Wait as long as the network takes; whether the request is to be passed on at all."""
        fault = self.choose(head.partition(b"\r\n")[0].decode("latin-1"))
        self.at_once += 1
        self.stats["requests"] += 1
        self.stats["max_at_once"] = max(self.stats["max_at_once"], self.at_once)
        answers.begin(fault)
        if self.first_byte_s[1]:
            await asyncio.sleep(self.random.uniform(*self.first_byte_s))
        if fault in ERRORS:
            answers.answered()
            answers.client.write(_answer(*ERRORS[fault]))
        elif fault == "reset":
            answers.client.abort()
        return fault in ("", "cut", "stall")


class _Answers(asyncio.Protocol):
    """What the server says on the connection that belongs to one of a client."""

    def __init__(self, proxy: _Proxy, client: asyncio.WriteTransport) -> None:
        self.proxy, self.client = proxy, client
        self.begin("")
        self.unanswered = False

    def begin(self, fault: str) -> None:
        """A request comes, whose answer is to break as `fault` says."""
        self.fault = fault
        self.left: int | None = None  # bytes of the answer until it breaks, once that is known
        self.unanswered = True

    def answered(self) -> None:
        """The answer to the request has begun, or will never come."""
        if self.unanswered:
            self.unanswered = False
            self.proxy.at_once -= 1

    def data_received(self, data: bytes) -> None:
        self.answered()
        if self.fault in ("cut", "stall"):
            if self.left is None:
                length = _LENGTH.search(data)
                self.left = data.index(b"\r\n\r\n") + 4 + (int(length[1]) if length else 2) // 2
            data = data[: self.left]
            self.left -= len(data)
        self.client.write(data)
        if self.fault == "cut" and self.left == 0:
            self.client.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.answered()
        self.client.close()


def _answer(status: str, code: str, message: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


async def _serve(proxy: _Proxy) -> None:
    """Serve, and obey the commands on stdin until it is closed."""

    async def listen(at: int = 0) -> asyncio.Server:
        return await asyncio.start_server(proxy.connect, "127.0.0.1", at, backlog=512)

    server = await listen()
    port = {"port": server.sockets[0].getsockname()[1]}
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(commands), sys.stdin
    )
    while line := await commands.readline():
        told = proxy.obey(json.loads(line))
        if proxy.is_gone:
            server.close()
        elif not server.is_serving():
            server = await listen(port["port"])
        print(json.dumps({**port, **told}), flush=True)
    os._exit(0)  # not waiting for anybody


if __name__ == "__main__":
    asyncio.run(_serve(_Proxy(int(sys.argv[1]), *map(float, sys.argv[2:]))))
